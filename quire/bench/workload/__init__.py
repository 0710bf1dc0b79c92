"""Inputs of measurements: models of known shapes, adapters, and requests."""
