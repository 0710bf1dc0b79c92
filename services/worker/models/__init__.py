"""Model families: a table of architectures, each read from its config.json and built from common layers."""
