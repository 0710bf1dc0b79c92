"""KV offloading to disk and to host memory that a restarted worker finds again."""
