"""Transcription and translation of sound files by Whisper: forms, calls of the model, and answers."""
