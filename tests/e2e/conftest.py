"""Real processes on free ports, with the bundled model on the CPU."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.client import Client
from quire.cluster import Cluster, ClusterOptions


@contextmanager
def running_cluster(
    workers: int = 1,
    frontends: int = 1,
    schedulers: int = 1,
    apart: tuple[int, int] = (0, 0),
    encode_workers: int = 0,
    redis: str = "auto",
    model: str = "",
    **settings: dict[str, Any],
) -> Iterator[Cluster]:
    """Runs a cluster with `worker={...}`, `scheduler={...}`, `frontend={...}` settings; its logs go to stderr. `apart`:
    numbers of prefill and decode workers, instead of `workers`."""
    options = ClusterOptions(
        workers=0 if any(apart) else workers,
        prefill_workers=apart[0],
        decode_workers=apart[1],
        encode_workers=encode_workers,
        frontends=frontends,
        schedulers=schedulers,
        redis=redis,
        model=model,
        http_port=0,
        grpc_port=0,
        settings=settings,
    )
    log = sys.stderr if _has_descriptor(sys.stderr) else None
    with Cluster(options, log=log) as cluster:
        yield cluster


def _has_descriptor(stream: io.TextIOBase | Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Cluster shared by all tests that leave its state unchanged."""
    with running_cluster(worker={"num_blocks": 2000}) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.grpc_address) as connected:
        yield connected
