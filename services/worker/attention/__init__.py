"""Attention behind a port: several implementations, each of which can say why it must not be used."""
