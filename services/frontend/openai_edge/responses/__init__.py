"""/v1/responses: OpenAI's newer way to ask, in items instead of messages."""
