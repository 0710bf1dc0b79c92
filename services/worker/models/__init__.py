"""Model families: a table of architectures, each read from its config.json into the one decoder that runs them all."""
