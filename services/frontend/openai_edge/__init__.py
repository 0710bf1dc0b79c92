"""HTTP API: OpenAI's API with vLLM's additions, and the endpoints for operators (/health, /metrics, ...)."""
