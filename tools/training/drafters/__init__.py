"""Training of draft models for quire-tiny, for speculative decoding."""
