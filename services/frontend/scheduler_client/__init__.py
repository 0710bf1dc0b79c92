"""Sequences on their way through schedulers: submitted, moved when a session breaks, ended exactly once."""
