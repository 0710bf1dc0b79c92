"""quire.kernels.triton beside torch, or what the hardware allows."""
