"""Data that frontends read from Redis: the list of schedulers, and where prompt prefixes are cached."""
