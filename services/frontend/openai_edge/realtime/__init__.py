"""WebSocket /v1/realtime: transcription of sound as it arrives, in the events of OpenAI and of vLLM."""
