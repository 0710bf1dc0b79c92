"""Command-line flags: from settings and cluster options, their help, and flag files."""
