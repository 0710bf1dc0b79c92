"""Metrics of every service: Quire's own names and the `vllm:` ones that existing dashboards read (README.md here)."""
