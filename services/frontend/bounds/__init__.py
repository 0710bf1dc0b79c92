"""What is too large is refused here, before it is parsed, converted, put through a template or tokenized."""
