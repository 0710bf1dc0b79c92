"""Encoders of sound that turn log-mel features into rows of text embeddings."""
