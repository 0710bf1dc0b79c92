"""Workers that draft and are killed: outputs are those without drafting."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import bundled
from quire.cluster import Cluster
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, Said
from tests.chaos.test_workers import assert_survives, pid
from tests.e2e.conftest import running_cluster

pytestmark = pytest.mark.timeout(300)

DRAFT = Path(bundled.FOLDER).parent / "drafters" / "draft"
CONFIG = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4, "adaptive_length": False}

EVERYTHING = pytest.param("everything", marks=pytest.mark.sweep)  # a minute and more on two cores


@pytest.fixture
def drafting() -> Iterator[Cluster]:
    worker = WORKER | {"speculative_config": json.dumps(CONFIG)}
    patient = SCHEDULER | {"step_deadline_s": 30.0}  # a step of all with their drafts, on a busy machine
    with running_cluster(workers=2, worker=worker, scheduler=patient, frontend=FRONTEND) as cluster:
        yield cluster


def accepted_tokens(cluster: Cluster) -> float:
    address = next(p for p in cluster.processes if p.spec.role == "scheduler").addresses["metrics"]
    page = httpx.get(f"http://{address}/metrics").text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return sum(s.value for s in samples if s.name == "vllm:spec_decode_num_accepted_tokens_total")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "constrained", EVERYTHING])
async def test_one_of_two_is_killed(drafting: Cluster, undisturbed: dict[str, Said], kind: str) -> None:
    await assert_survives(drafting, undisturbed, lambda: os.kill(pid(drafting, "worker-0"), signal.SIGKILL), kind)
    assert accepted_tokens(drafting) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", EVERYTHING])
async def test_a_drafting_worker_leaves(drafting: Cluster, undisturbed: dict[str, Said], kind: str) -> None:
    await assert_survives(drafting, undisturbed, lambda: os.kill(pid(drafting, "worker-1"), signal.SIGTERM), kind)
    assert accepted_tokens(drafting) > 100
