"""Plans in on the event loop, results out on it, and the device's threads between (engine.py)."""
