"""HTTP API of Anthropic's clients: /v1/messages and /v1/messages/count_tokens."""
