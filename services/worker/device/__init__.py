"""The device as torch sees it, the way up to it, and time on it."""
