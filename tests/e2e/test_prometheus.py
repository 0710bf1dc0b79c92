"""A real Prometheus finds the services of `quire up` by the file it writes, and the dashboard's panels have data."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from tests.deploy.paths import GRAFANA

PROMETHEUS = shutil.which("prometheus")
# Where there is nothing to show: nobody died, nothing was drafted, no device of known speed, no expert.
QUIET_ROWS = ("Parts that die, leave or are full", "Speculative decoding")

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")


@contextmanager
def watching(folder: Path, targets: Path) -> Iterator[str]:
    """The address of a Prometheus that looks every second."""
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "quire", "file_sd_configs": [{"files": [str(targets)]}]}]
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen([str(PROMETHEUS), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def ask(address: str, query: str) -> list[Any]:
    try:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}).json()
    except httpx.TransportError:  # it is starting
        return []
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


def panels() -> dict[str, list[str]]:
    """Queries by title, of those that have data under plain load."""
    found, row = {}, ""
    for panel in json.loads((GRAFANA / "dashboards" / "quire.json").read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif row not in QUIET_ROWS:
            found[f"{row}: {panel['title']}"] = [
                target["expr"].replace("$model_name", "quire-tiny").replace("$__rate_interval", "1m")
                for target in panel["targets"]
            ]
    return found


def test_panels_have_data_under_load(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    settings = {"worker": {"num_blocks": 300}}
    options = ClusterOptions(http_port=0, grpc_port=0, settings=settings, metrics_targets_file=str(targets))
    with Cluster(options) as cluster, watching(tmp_path, targets) as prometheus, Client(cluster.grpc_address) as client:
        missing, deadline = panels(), time.monotonic() + 60
        while missing:
            assert time.monotonic() < deadline, missing
            client.generate(["Once upon a time"] * 4, SamplingParams(max_tokens=20, ignore_eos=True))
            httpx.get(f"http://{cluster.http_address}/v1/models")
            missing = {title: asked for title, asked in missing.items() if not any(ask(prometheus, q) for q in asked)}
        jobs = {result["metric"]["job"] for result in ask(prometheus, "up == 1")}
    assert jobs == {"quire-frontend", "quire-scheduler", "quire-worker"}
