"""Layers of decoders. Each knows its tensors' names in the checkpoint and where they go; the loader is one loop."""
