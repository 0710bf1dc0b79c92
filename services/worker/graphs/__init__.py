"""Records steps as CUDA graphs, so that a step costs one launch."""
