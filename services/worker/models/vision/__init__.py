"""Vision towers: pictures to rows that stand in the place of token embeddings."""
