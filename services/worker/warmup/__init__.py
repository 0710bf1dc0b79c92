"""What a start does beside the loading of a model: imports and compiled kernels."""
