"""Vision towers, which turn pictures into rows that take the place of token embeddings."""
