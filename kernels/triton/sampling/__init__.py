"""Choosing tokens: by temperature and filters, among those that a grammar allows."""
