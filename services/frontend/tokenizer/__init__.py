"""Text to tokens, tokens to pieces of text, messages to text: everything that the model's folder says about it."""
