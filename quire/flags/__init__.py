"""Command-line flags: of the services' settings and of a cluster, their help, and the file that may hold them."""
