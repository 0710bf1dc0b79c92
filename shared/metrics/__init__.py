"""Metrics of every service: Quire's own names and the `vllm:` ones (docs/operations/monitoring.md)."""
