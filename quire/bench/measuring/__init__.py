"""Measurement tools: the machine, CPU time, caches and statistics."""
