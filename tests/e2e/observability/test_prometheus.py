"""A real Prometheus discovers the services of `quire up` from the file it writes, and all dashboard panels
have data."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import SamplingParams, bundled
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.params import StructuredOutput
from quire.shared.errors import NotFound
from tests.deploy.paths import GRAFANA
from tests.ports import quiet_port

PROMETHEUS = shutil.which("prometheus")
QUIET_ROWS = ("Experts",)  # the bundled model has none
PATIENCE_S = 240  # of rates over a minute, on a busy machine
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
TURNS, VICTIMS = 12, {0: "worker-1", 6: "scheduler-1"}  # what counters say of a death is seen before who counts dies

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")


@contextmanager
def watching(folder: Path, targets: Path) -> Iterator[str]:
    """Address of a Prometheus that scrapes every second."""
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "quire", "file_sd_configs": [{"files": [str(targets)]}]}]
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    address = f"127.0.0.1:{quiet_port()}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen([str(PROMETHEUS), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def ask(address: str, query: str) -> list[Any]:
    try:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query})
    except httpx.TransportError:  # it is starting
        return []
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it listens, and still starts
        return []
    assert answer.json()["status"] == "success", (query, answer.text)
    return list(answer.json()["data"]["result"])


def had_data(address: str, query: str) -> bool:
    """Returns whether the query had data recently, as some series exist only under load."""
    late = f"max_over_time(({query})[30s:1s])"
    return any(not math.isnan(float(result["value"][1])) for result in ask(address, late))


def panels() -> set[tuple[str, str]]:
    """(dashboard, row and title; query) of every panel."""
    found, row = set(), ""
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
            elif row not in QUIET_ROWS:
                for target in panel["targets"]:
                    query = target["expr"].replace("$model_name", "quire-tiny").replace("$__rate_interval", "1m")
                    found.add((f"{path.stem}: {row}: {panel['title']}", query))
    return found


def make_load(cluster: Cluster, client: Client, turn: int) -> None:
    """Generates load of all kinds that panels show; a worker or a scheduler is killed during some of it."""
    http = f"http://{cluster.http_address}"
    httpx.post(f"{http}/v1/embeddings", json={"input": ["a fox", "an oak"]}).raise_for_status()
    httpx.post(f"{http}/v1/completions", json={"model": "pirate", "prompt": "Once", "max_tokens": 2}).raise_for_status()
    call = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 2}}
    sent = (
        httpx.post(f"{http}/v1/files", files={"file": json.dumps(call)}, data={"purpose": "batch"})
        .raise_for_status()
        .json()
    )
    batch = {"input_file_id": sent["id"], "endpoint": call["url"], "completion_window": "24h"}
    httpx.post(f"{http}/v1/batches", json=batch).raise_for_status()
    body = {"prompt": "Once upon a time", "max_tokens": 2}
    httpx.post(f"{http}/v1/completions", json=body, headers={"x-tenant": "a"})
    httpx.post(f"{http}/v1/completions", json={**body, "n": 0}, headers={"x-tenant": "b"})
    form = StructuredOutput(regex=f"[a-z]{{3,{9 + turn}}}")  # which was not compiled before
    constrained = SamplingParams(max_tokens=10, structured_output=form)
    client.generate("A word: ", constrained)
    with contextlib.closing(client.stream("Once", LONG)) as stream:  # which ends before its tokens do
        next(stream)
    if turn % 4 == 0:  # a tenant has room for 64 streams that are kept
        background = {"input": "Once", "background": True, "max_output_tokens": 20}
        response = httpx.post(f"{http}/v1/responses", json=background).raise_for_status().json()
        httpx.get(f"{http}/v1/responses/{response['id']}")
    with contextlib.suppress(NotFound):
        next(client.attach("nobody began it"))
    streams = [client.stream(f"{number} " * 40, LONG) for number in range(6)]
    for stream in streams:
        next(stream)
    victim = VICTIMS.get(turn % TURNS)
    if victim and (process := cluster.process(victim)).ready.is_set() and process.running:
        process.signal(signal.SIGKILL)
    assert all(list(stream) for stream in streams)


@pytest.mark.slow
def test_panels_have_data_under_load(tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    disk = {"kv_offloading_disk": str(tmp_path / "disk"), "kv_offloading_disk_size": 0.05}
    adapters = {"lora": {"pirate": str(bundled.ADAPTERS / "pirate")}}
    worker = {"num_blocks": 300, "kv_offloading_size": 0.01, "speculative_config": drafts, **disk, **adapters}
    scheduler = {"kv_handover": "always", "placement": "round_robin", "prefill_threshold": 64}
    frontend = {"batch_folder": str(tmp_path / "batches")}
    options = ClusterOptions(
        http_port=0,
        grpc_port=0,
        workers=2,
        prefill_workers=1,  # one of the schedulers has two workers at least, which fetch from each other
        decode_workers=1,
        schedulers=2,
        settings={"worker": worker, "scheduler": scheduler, "frontend": frontend},
        metrics_targets_file=str(targets),
    )
    with Cluster(options) as cluster, watching(tmp_path, targets) as prometheus, Client(cluster.grpc_address) as client:
        missing, deadline = panels(), time.monotonic() + PATIENCE_S
        for turn in itertools.count():
            missing = {(title, query) for title, query in missing if not had_data(prometheus, query)}
            if not missing:
                break
            assert time.monotonic() < deadline, "; ".join(map(": ".join, sorted(missing)))
            make_load(cluster, client, turn)
        jobs = {result["metric"]["job"] for result in ask(prometheus, "up == 1")}
    assert jobs == {"quire-frontend", "quire-scheduler", "quire-worker"}
