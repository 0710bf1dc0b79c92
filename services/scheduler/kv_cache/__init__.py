"""Which KV block belongs to whom, and which prefix it holds. Pure: no clock, no I/O, no randomness."""
