"""The HTTP server: connections, the wire protocol, and its limits."""
