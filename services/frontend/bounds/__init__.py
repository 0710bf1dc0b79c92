"""Size limits, checked before input is parsed, converted, rendered by a template or tokenized."""
