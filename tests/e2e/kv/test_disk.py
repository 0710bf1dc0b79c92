"""KV blocks on disk, through real processes: prompts are read back, also by a restarted worker, and outputs do not
change."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from quire.client import Client
from quire.cluster import Cluster
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_host_memory import FEW, questions, say
from tests.waiting import until_nothing_moves


def few(folder: Path) -> dict[str, object]:
    """A device of 39 blocks, host memory of a few more, and a disk that holds everything."""
    return {
        "num_blocks": 40,
        "block_size": 16,
        "kv_offloading_size": 0.0036,  # 58 blocks in bfloat16, 29 in float32
        "kv_offloading_disk": str(folder),
        "kv_offloading_disk_size": 0.1,
    }


@pytest.mark.slow
def test_host_memory_in_a_region_outlives_a_worker_that_was_killed(client: Client) -> None:
    asked = questions()
    expected, num_prompt_tokens, _ = say(client, asked)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as region:
        settings = FEW | {"kv_offloading_region": region}
        with running_cluster(worker=settings) as cluster, Client(cluster.grpc_address) as patient:
            first, *_ = say(patient, asked)
            kill_worker(cluster)
            again, _, cached = say(patient, asked)
            assert [first, again] == [expected, expected]
            assert cached > num_prompt_tokens / 2


def kill_worker(cluster: Cluster) -> None:
    os.kill(pid(cluster, "worker-0"), signal.SIGKILL)


@pytest.mark.slow
def test_prompts_return_from_disk_also_after_a_killed_worker(client: Client, tmp_path: Path) -> None:
    asked = questions()
    expected, num_prompt_tokens, _ = say(client, asked)
    with running_cluster(worker=few(tmp_path)) as cluster, Client(cluster.grpc_address) as patient:
        first, *_ = say(patient, asked)
        held = until_nothing_moves(patient)
        again, _, cached = say(patient, asked)
        after = until_nothing_moves(patient).disk
        assert [first, again] == [expected, expected]
        assert held.host_memory.total < 60 < held.disk.held, "more than host memory has"
        assert (after.lost, after.dropped) == (0, 0)
        assert after.fetched > 40
        assert cached > num_prompt_tokens / 2
        kill_worker(cluster)
        again, _, cached = say(patient, asked)
        assert again == expected
        assert cached > num_prompt_tokens / 2, "it found them in the folder"
