"""Files with secrets, and TLS certificates."""
