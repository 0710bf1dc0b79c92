"""Files that guard something: secrets, and certificates for TLS."""
