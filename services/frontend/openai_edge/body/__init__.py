"""Request bodies in JSON, and their conversion to requests."""
