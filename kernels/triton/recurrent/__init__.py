"""Recurrent layers, whose states lie in pages (kernels/state_pages.py). Nothing asks the host how long rows are."""
