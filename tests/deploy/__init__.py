"""Deployment files: images, compose, Kubernetes, Prometheus, Grafana. Checked without an engine or a cluster."""
