"""Feed-forward layers, dense and as mixtures of experts."""
