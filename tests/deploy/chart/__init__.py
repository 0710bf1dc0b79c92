"""The Helm chart k8s/chart, made of what kustomize builds: `python -m tests.deploy.chart` writes it."""
