"""Builds the documentation: `make docs` writes the site to build/docs, `make docs-serve` shows it while you edit."""
