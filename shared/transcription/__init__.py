"""Parts of transcription that need no model: cutting and joining of sound, time stamps, checks and file formats."""
