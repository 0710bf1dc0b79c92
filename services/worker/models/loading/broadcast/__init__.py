"""Weights that a trainer broadcasts in a process group of torch.distributed."""
