"""Adapters of grammar libraries, one module each, and the selection among them."""
