"""Layers of decoders and encoders. Each names its checkpoint tensors and their destinations; the loader is one loop."""
