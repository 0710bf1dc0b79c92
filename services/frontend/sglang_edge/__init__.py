"""HTTP API of SGLang's clients: /generate."""
