"""Normalisation of what goes into layers and of heads."""
