"""KV of windows and of ranks below the device, through real processes: prompts are read back, and outputs do not
change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.client import Client
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_disk import few, kill_worker
from tests.e2e.kv.test_host_memory import FEW, questions, say
from tests.kv_groups import models
from tests.waiting import until_nothing_moves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WINDOW = 48
PLENTY = 4000  # blocks
EXACT = {"dtype": "float32"}


def windowed(folder: Path) -> str:
    """quire-tiny with a window in every other layer, so that a page is half as large."""
    return str(models.tiny(folder, WINDOW).folder)


def undisturbed(worker: dict[str, Any], model: str = "") -> tuple[list[str], int]:
    """Outputs with a device that holds everything."""
    settings = worker | {"num_blocks": PLENTY}
    with running_cluster(worker=settings, model=model) as cluster, Client(cluster.grpc_address) as client:
        texts, num_prompt_tokens, _ = say(client, questions())
        return texts, num_prompt_tokens


def test_windows_return_from_host_memory(tmp_path: Path) -> None:
    model = windowed(tmp_path)
    expected, num_prompt_tokens = undisturbed(EXACT, model)
    settings = FEW | EXACT | {"num_blocks": 80}
    with running_cluster(worker=settings, model=model) as cluster, Client(cluster.grpc_address) as client:
        first, *_ = say(client, questions())
        held = until_nothing_moves(client).host_memory
        again, _, cached = say(client, questions())
        after = until_nothing_moves(client).host_memory
    assert [first, again] == [expected, expected]
    assert held.held > 80, "more than the device has"
    assert after.fetched > 40
    assert after.failed_transfers == 0
    assert cached > num_prompt_tokens / 2


def test_windows_return_from_disk_after_a_killed_worker(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model")
    expected, num_prompt_tokens = undisturbed(EXACT, model)
    settings = few(tmp_path / "kv") | EXACT | {"num_blocks": 80}
    with running_cluster(worker=settings, model=model) as cluster, Client(cluster.grpc_address) as client:
        first, *_ = say(client, questions())
        until_nothing_moves(client)
        kill_worker(cluster)
        again, _, cached = say(client, questions())
        after = until_nothing_moves(client).disk
    assert [first, again] == [expected, expected]
    assert after.fetched > 40
    assert cached > num_prompt_tokens / 2


def test_both_ranks_get_their_parts_back_from_host_memory() -> None:
    ranks = {"tensor_parallel_size": 2} | EXACT
    expected, num_prompt_tokens = undisturbed(ranks)
    with running_cluster(worker=FEW | ranks) as cluster, Client(cluster.grpc_address) as client:
        first, *_ = say(client, questions())
        held = until_nothing_moves(client).host_memory
        again, _, cached = say(client, questions())
        after = until_nothing_moves(client).host_memory
    assert [first, again] == [expected, expected]
    assert held.held > 60, "more than the device has"
    assert after.fetched > 40
    assert cached > num_prompt_tokens / 2
