"""A client's request to work for a scheduler: checked, completed with defaults, tokenized, hashed."""
