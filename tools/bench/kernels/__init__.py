"""What the kernels cost, beside what they replace, in one run."""
