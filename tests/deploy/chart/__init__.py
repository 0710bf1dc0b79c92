"""The Helm chart k8s/chart, generated from the kustomizations: `python -m tests.deploy.chart` writes it."""
