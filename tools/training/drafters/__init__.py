"""Small models that guess what quire-tiny says next, for speculative decoding."""
