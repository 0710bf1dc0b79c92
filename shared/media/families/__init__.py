"""Processing of pictures and videos, one module for each model family."""
