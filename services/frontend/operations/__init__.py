"""Operators' work on schedulers and adapters, whichever edge it comes through."""
