"""Facts of media that frontends and workers share: sizes, numbers of embeddings, identifiers."""
