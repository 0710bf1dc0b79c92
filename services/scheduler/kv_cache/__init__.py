"""KV block management: owners of blocks and their cached prefixes. Pure: no clock, no I/O, no randomness."""
