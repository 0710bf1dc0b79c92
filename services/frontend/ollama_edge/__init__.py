"""The HTTP face that Ollama's clients know: /api/chat, /api/generate, /api/embed, /api/tags, /api/show."""
