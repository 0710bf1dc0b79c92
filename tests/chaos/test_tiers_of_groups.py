"""KV of windows and of ranks below the device under failures: outputs are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.client import Client
from tests.chaos.conftest import FRONTEND, leaves_nothing_behind
from tests.chaos.test_ranks import rank_of
from tests.chaos.test_tiers import PATIENCE_S, SMALL, files, stored
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_disk import few, kill_worker
from tests.e2e.kv.test_host_memory import FEW, host_memory, questions, say
from tests.e2e.kv.test_tiers_of_groups import EXACT, undisturbed, windowed
from tests.waiting import until, until_nothing_moves, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def region() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def test_a_worker_with_windows_that_is_killed_while_it_stores(tmp_path: Path, region: str) -> None:
    """Killed twice with a host memory region and a disk, some of whose files are then corrupt or missing."""
    model = windowed(tmp_path / "model")
    expected, num_prompt_tokens = undisturbed(EXACT, model)
    folder = tmp_path / "kv"
    settings = few(folder) | EXACT | {"num_blocks": 80, "kv_offloading_region": region}
    with (
        running_cluster(worker=settings, scheduler=SMALL, frontend=FRONTEND, model=model) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        for _ in range(2):
            with ThreadPoolExecutor(1) as asking:
                said: Future[Any] = asking.submit(say, client, questions())
                stored(client, 4, said)
                kill_worker(cluster)
                assert said.result(PATIENCE_S)[0] == expected
            until_nothing_moves(client)
            for path in files(folder)[::4]:
                path.unlink()
            for path in files(folder)[1::4]:
                os.truncate(path, path.stat().st_size // 2)
        again, _, cached = say(client, questions())
        assert again == expected
        assert cached > num_prompt_tokens / 4
        assert worker_of(client).disk.lost > 0
        leaves_nothing_behind(cluster)


def test_a_rank_that_is_killed_while_it_stores() -> None:
    """Killed twice: the worker's epoch ends, and the next one starts with empty host memory."""
    ranks = {"tensor_parallel_size": 2} | EXACT
    expected, _ = undisturbed(ranks)
    with (
        running_cluster(worker=FEW | ranks, scheduler=SMALL, frontend=FRONTEND) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        for _ in range(2):
            with ThreadPoolExecutor(1) as asking:
                said: Future[Any] = asking.submit(say, client, questions())
                before = host_memory(client).stored
                until(lambda before=before, said=said: host_memory(client).stored >= before + 4 or said.done())
                os.kill(rank_of(cluster, "worker-0"), signal.SIGKILL)
                assert said.result(PATIENCE_S)[0] == expected
        again, num_prompt_tokens, cached = say(client, questions())
        assert again == expected
        assert cached > num_prompt_tokens / 2
        leaves_nothing_behind(cluster)
