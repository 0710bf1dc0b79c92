"""Conversion of step plans and results between plain values and worker.proto."""
