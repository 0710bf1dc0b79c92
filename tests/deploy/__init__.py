"""What runs Quire elsewhere: images, compose, Kubernetes, Prometheus, Grafana. Checked without engine or cluster."""
