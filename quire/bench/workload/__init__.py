"""What is measured with: models of known shapes, adapters, and requests."""
