"""quire.kernels.cpu beside torch and the reference."""
