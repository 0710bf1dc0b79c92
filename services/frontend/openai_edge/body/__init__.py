"""Bodies in JSON, and the requests of the frontend that they become."""
