"""Ollama's HTTP API: /api/chat, /api/generate, /api/embed, /api/tags, /api/show."""
