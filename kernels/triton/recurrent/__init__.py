"""Recurrent layers with states in pages (kernels/state_pages.py). Row lengths are never read on the host."""
