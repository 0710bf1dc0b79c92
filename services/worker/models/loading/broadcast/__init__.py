"""Weights broadcast by a trainer in a process group of torch.distributed."""
