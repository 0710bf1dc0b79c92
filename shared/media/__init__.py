"""Processing of media that frontends and workers must agree on: sizes, tiles, placeholder tokens, normalization."""
