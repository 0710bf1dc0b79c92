"""Sampling of tokens by temperature and filters, with grammar masks."""
