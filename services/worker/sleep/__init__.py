"""A worker gives the memory of its device to others for a while, and takes it again at the same addresses."""
