"""Resumable streams: generations that continue after the client's call ends and can be re-attached by offset."""
