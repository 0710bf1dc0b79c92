"""Feed-forward layers: dense and mixtures of experts."""
