"""ASGI middleware that wraps every HTTP call, from path normalization to admission."""
