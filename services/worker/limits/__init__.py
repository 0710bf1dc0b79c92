"""How much a worker holds at a time: its limits, and the KV groups of its model."""
