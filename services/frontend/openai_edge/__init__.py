"""The HTTP face: OpenAI's API as vLLM's clients know it, and what operators ask (/health, /metrics, ...)."""
