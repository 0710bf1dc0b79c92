"""The HTTP face that Anthropic's clients know: /v1/messages and /v1/messages/count_tokens."""
