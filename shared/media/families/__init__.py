"""Processing of pictures, videos and sound, one module for each model family."""
