"""Routes of the HTTP API, by subject."""
