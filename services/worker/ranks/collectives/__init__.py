"""Sums of ranks: through NCCL or Gloo, and through memory that the GPUs of one host share."""
