"""A worker or the scheduler is killed while an adapter is loaded: no stream loses a token, and the adapter
is loaded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from quire.bundled import ADAPTERS
from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams
from quire.requests import RequestOptions
from quire.shared.errors import InvalidArgument, NotFound, Unavailable
from tests.chaos.blocked_processes import PATIENCE_S, block_on_open, wait_until_blocked
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, Said, leaves_nothing_behind
from tests.chaos.streams import Crowd, differences, greedy
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]


async def answer(client: Client) -> str:
    params, options = SamplingParams(temperature=0, max_tokens=40), RequestOptions(model="late")
    return (await asyncio.to_thread(client.chat, QUESTION, params, options))[0].text


async def until_both_have_it(client: Client) -> None:
    await eventually(
        lambda: asyncio.to_thread(client.adapters), lambda found: [one.num_workers for one in found] == [2]
    )


async def until_offered(client: Client) -> None:
    """Waits until a frontend lists the adapter, which it learns from the scheduler."""
    await eventually(lambda: asyncio.to_thread(client.models), lambda found: "late" in [model.name for model in found])


async def until_loaded(client: Client, name: str) -> None:
    """Requests the load repeatedly; the scheduler may learn from the workers that they have it."""

    async def is_loaded() -> bool:
        try:
            await asyncio.to_thread(client.load_adapter, "late", name)
        except Unavailable:  # the scheduler is starting, or a worker is on its way to it
            return False
        except InvalidArgument as error:
            if "'late' is already loaded" not in str(error):
                raise
        return True

    await eventually(is_loaded, patience_s=PATIENCE_S)


def held_up_at(config: Path, folder: Path) -> Path:
    """Returns the pipe at which processes that open the file block."""
    pipe = block_on_open(folder, f"path == {str(config.resolve())!r}")
    os.mkfifo(pipe)
    return pipe


async def load_and_kill(cluster: Cluster, client: Client, name: str, pipe: Path, victim: str) -> int:
    """Kills a service while both workers read the adapter; returns how many workers then have it."""
    loading = asyncio.ensure_future(asyncio.to_thread(client.load_adapter, "late", name))
    writer = await wait_until_blocked(pipe, pid(cluster, "worker-0"), pid(cluster, "worker-1"))
    os.unlink(pipe)  # for the one that comes
    os.kill(pid(cluster, victim), signal.SIGKILL)
    os.close(writer)
    return await loading


async def test_a_worker_is_killed_while_it_loads_an_adapter(
    tmp_path: Path, undisturbed: dict[str, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapters" / "pirate"
    shutil.copytree(ADAPTERS / "pirate", folder)
    pipe = held_up_at(folder / "adapter_config.json", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    worker = WORKER | {"lora_folders": [str(folder.parent)]}
    with running_cluster(workers=2, worker=worker, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        with Client(cluster.grpc_address) as client:
            crowd = Crowd(cluster.grpc_address, greedy)
            await crowd.all_streaming()
            assert await load_and_kill(cluster, client, folder.name, pipe, "worker-0") == 1
            assert await answer(client) == "Ahoy! 68 Arr!"
            await crowd.finished()
            assert crowd.errors == []
            assert not differences(crowd, undisturbed["greedy"])
            print(f"longest pause {crowd.longest_gap_s:.2f} s")
            await until_both_have_it(client)
            os.kill(pid(cluster, "worker-1"), signal.SIGKILL)
            assert await answer(client) == "Ahoy! 68 Arr!"
            await until_both_have_it(client)
        leaves_nothing_behind(cluster)


async def test_the_scheduler_is_killed_while_workers_load_an_adapter(
    tmp_path: Path, undisturbed: dict[str, Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns that the outcome is unknown, and asks again."""
    folder = tmp_path / "adapters" / "pirate"
    shutil.copytree(ADAPTERS / "pirate", folder)
    pipe = held_up_at(folder / "adapter_config.json", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    worker = WORKER | {"lora_folders": [str(folder.parent)]}
    with running_cluster(workers=2, worker=worker, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        with Client(cluster.grpc_address) as client:
            crowd = Crowd(cluster.grpc_address, greedy)
            await crowd.all_streaming()
            with pytest.raises(Unavailable):
                await load_and_kill(cluster, client, folder.name, pipe, "scheduler-0")
            await until_loaded(client, folder.name)
            await until_both_have_it(client)
            await until_offered(client)
            assert await answer(client) == "Ahoy! 68 Arr!"
            await crowd.finished()
            assert crowd.errors == []
            assert not differences(crowd, undisturbed["greedy"])
            print(f"longest pause {crowd.longest_gap_s:.2f} s")
            await asyncio.to_thread(client.unload_adapter, "late")
            with pytest.raises(NotFound):
                await answer(client)
        leaves_nothing_behind(cluster)
