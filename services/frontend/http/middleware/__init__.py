"""ASGI middleware around every HTTP call, from the path to the admission of work."""
