"""Collectives of ranks, over NCCL or Gloo and over memory that the GPUs of one host share."""
