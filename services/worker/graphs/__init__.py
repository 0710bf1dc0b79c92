"""Steps recorded as CUDA graphs, launched at the price of one."""
