"""The HTTP face that SGLang's clients know: /generate."""
