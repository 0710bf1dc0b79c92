"""API of /v1/responses, OpenAI's successor of chat completions, with items instead of messages."""
