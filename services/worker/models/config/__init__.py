"""What config.json says, read and checked. Needs no torch."""
