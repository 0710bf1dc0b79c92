"""Paths of the deployment files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
COMPOSE = ROOT / "docker-compose.yml"
PROMETHEUS = K8S / "observability" / "prometheus"
GRAFANA = K8S / "observability" / "grafana"
BASE_CONFIG = K8S / "base" / "quire.yaml"
DOCKERFILE = ROOT / "Dockerfile"
KUSTOMIZATIONS = [
    "base",
    "overlays/cpu-demo",
    "overlays/gpu",
    "overlays/gpu-to-zero",
    "overlays/gpu-tiers",
    "overlays/gpu-roles",
    "overlays/gpu-encode",
    "overlays/gpu-hosts",
    "overlays/gateway",
]
