"""What frontends and workers have to know alike of media: sizes, numbers of embeddings, identifiers."""
