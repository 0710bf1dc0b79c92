"""The memory of keys and values, how much of it there is, and what its blocks hold."""
