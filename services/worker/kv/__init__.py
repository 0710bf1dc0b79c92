"""Memory of keys and values: its size, its blocks and what they hold."""
