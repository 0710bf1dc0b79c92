"""Transcription and translation of sound files by Whisper: forms, the passage through the model, and answers."""
