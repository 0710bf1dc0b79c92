"""A worker or the scheduler is killed during an operation on all workers: sleep, wake-up, weight updates. The call
ends, successful or with an error; a repeated call succeeds; no stream loses a token or mixes weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from quire import LLMEngine, SamplingParams, bundled
from quire.client import Client
from quire.cluster import Cluster
from quire.outputs import RequestOutput
from quire.shared.errors import Unavailable
from quire.shared.pb.admin.v1 import admin_pb2
from tests.chaos.blocked_processes import block_in_function, block_on_open, wait_until_blocked
from tests.chaos.conftest import FRONTEND, WORKER, Said, leaves_nothing_behind
from tests.chaos.streams import GREEDY_TOKENS, Crowd, differences, greedy
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.e2e.operations.test_weights import folder_of, shake
from tests.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROMPT = "Once upon a time there was a boy who counted: one, two, three, four,"
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ALL = ["kv_cache", "weights"]
STRENGTH = 0.6  # so that streams say something else at once
PATIENCE_S = 120.0  # processes start anew


class Operated:
    """A cluster of two workers, which block at the pipe at a certain moment, while it exists."""

    def __init__(self, cluster: Cluster, client: Client, pipe: Path) -> None:
        self.cluster, self.client, self._pipe = cluster, client, pipe

    def workers(self) -> list[admin_pb2.ServiceStatus]:
        return [one for one in self.client.status() if one.role == admin_pb2.ROLE_WORKER]

    def scheduler_state(self) -> admin_pb2.State:
        (found,) = [one for one in self.client.status() if one.role == admin_pb2.ROLE_SCHEDULER]
        return found.state

    async def until_both(self, holds: Callable[[admin_pb2.ServiceStatus], bool]) -> None:
        await asyncio.to_thread(until, lambda: [holds(one) for one in self.workers()] == [True, True], PATIENCE_S)

    async def kill_amid(
        self, victim: str, operation: Callable[[], object], meanwhile: Callable[[], object] = lambda: None
    ) -> object:
        """Kills the victim when both workers are blocked and `meanwhile` has been called; returns the operation's
        result, or Unavailable."""
        os.mkfifo(self._pipe)
        operating = asyncio.ensure_future(asyncio.to_thread(operation))
        writer = await wait_until_blocked(self._pipe, pid(self.cluster, "worker-0"), pid(self.cluster, "worker-1"))
        meanwhile()
        os.unlink(self._pipe)  # for later processes
        os.kill(pid(self.cluster, victim), signal.SIGKILL)
        os.close(writer)
        return await outcome(operating)

    async def kill_before_it_can_end(self, victim: str, operation: Callable[[], object]) -> object:
        """Kills the victim while a stopped worker keeps the operation from ending; returns its result, or
        Unavailable."""
        standing = pid(self.cluster, "worker-0")
        os.kill(standing, signal.SIGSTOP)
        operating = asyncio.ensure_future(asyncio.to_thread(operation))
        begun = (admin_pb2.STATE_PAUSED, admin_pb2.STATE_ASLEEP)  # the latter where the silent worker is given up
        await asyncio.to_thread(until, lambda: self.scheduler_state() in begun, PATIENCE_S)
        os.kill(pid(self.cluster, victim), signal.SIGKILL)
        if victim != "worker-0":
            os.kill(standing, signal.SIGCONT)
        return await outcome(operating)


async def outcome(operating: asyncio.Future[object]) -> object:
    try:
        return await operating
    except Unavailable as error:
        return error


async def until_done(operation: Callable[[], object]) -> None:
    """Repeats the operation while a scheduler starts or a worker catches up."""

    def is_done() -> bool:
        try:
            operation()
        except Unavailable:
            return False
        return True

    await asyncio.to_thread(until, is_done, PATIENCE_S)


@contextmanager
def operated_cluster(folder: Path, patch: pytest.MonkeyPatch, hold: Callable[[Path], Path]) -> Iterator[Operated]:
    """Runs the bundled model from a folder whose weights have an index, which Python reads, with other weights next to
    it. `hold`: installs into a folder what blocks processes."""
    folders = folder / "folders"
    shutil.copytree(bundled.FOLDER, folders / "model")
    folder_of(folders / "step-1", shake(1, strength=STRENGTH))
    for model in (folders / "model", folders / "step-1"):
        (file,) = model.glob("*.safetensors")
        index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    pipe = hold(folder)
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    worker = WORKER | {"weights_folders": [str(folders)]}
    # Heartbeats are the usual ones: a worker that is stopped is to be killed before it is given up.
    with running_cluster(workers=2, model=str(folders / "model"), worker=worker, frontend=FRONTEND) as cluster:
        with Client(cluster.grpc_address) as client:
            yield Operated(cluster, client, pipe)
        leaves_nothing_behind(cluster)


@pytest.fixture
def operated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operated]:
    """Cluster whose workers block before they read weights."""
    opened = f"path.startswith({str((tmp_path / 'folders').resolve())!r}) and path.endswith('.index.json')"
    with operated_cluster(tmp_path, monkeypatch, lambda folder: block_on_open(folder, opened)) as made:
        yield made


@pytest.fixture
def swapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operated]:
    """Cluster whose workers block when they have copied half of the tensors."""
    body = """
weights, pairs = arguments
half = len(pairs) // 2
assert half > 1
original(weights, pairs[:half])
wait()
original(weights, pairs[half:])
"""
    module = "quire.services.worker.models.loading.weights"
    with operated_cluster(
        tmp_path, monkeypatch, lambda folder: block_in_function(folder, module, "Weights._copy", body)
    ) as made:
        yield made


def greedy_tokens(model: Path) -> list[int]:
    """Outputs of an engine started with these weights."""
    with LLMEngine(str(model), threads=1, num_blocks=100) as engine:
        return list(engine.generate(PROMPT, SHORT)[0].outputs[0].token_ids)


def check_no_mixture(crowd: Crowd, old: Said, new: Path) -> int:
    """Checks that each stream has tokens of the old weights, followed by those that the new weights generate after
    them; returns how many streams have both."""
    with LLMEngine(str(new), threads=1, num_blocks=600) as engine:
        switched = 0
        for stream, (before, _, _) in zip(crowd.streams, old, strict=False):
            found, undisturbed = stream.token_ids[0], before[0]
            kept = next((n for n, (a, b) in enumerate(zip(found, undisturbed, strict=False)) if a != b), len(found))
            if kept == len(found):
                continue
            switched += 1
            tokens = [*engine.get_tokenizer()(stream.prompt, add_special_tokens=False)["input_ids"], *found[:kept]]
            rest = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS - kept)
            assert engine.generate(tokens, rest)[0].outputs[0].token_ids == found[kept:]
        return switched


async def say_what_they_always_say(crowd: Crowd, undisturbed: dict[str, Said]) -> None:
    await crowd.finished()
    assert crowd.errors == []
    assert not differences(crowd, undisturbed["greedy"])


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_service_is_killed_during_sleep_and_wake_up(
    operated: Operated, undisturbed: dict[str, Said], victim: str
) -> None:
    client = operated.client
    crowd = Crowd(operated.cluster.grpc_address, greedy)
    await crowd.all_streaming()
    slept = await operated.kill_before_it_can_end(victim, lambda: client.sleep(2))
    assert victim == "scheduler-0" or not isinstance(slept, Unavailable)
    await until_done(lambda: client.sleep(2))
    await operated.until_both(lambda worker: list(worker.asleep) == ALL)
    woken = await operated.kill_amid(victim, client.wake_up)
    assert isinstance(woken, Unavailable) if victim == "scheduler-0" else woken == []
    await until_done(client.wake_up)
    await operated.until_both(lambda worker: not worker.asleep and worker.state == admin_pb2.STATE_READY)
    await say_what_they_always_say(crowd, undisturbed)
    assert not client.is_sleeping()


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_service_is_killed_while_weights_are_staged(
    operated: Operated, undisturbed: dict[str, Said], victim: str, tmp_path: Path
) -> None:
    """No worker has new weights then: running streams finish with the old ones."""
    client = operated.client
    crowd = Crowd(operated.cluster.grpc_address, greedy)
    await crowd.all_streaming()
    changed = await operated.kill_amid(victim, lambda: client.update_weights_from_disk("step-1", "one", "keep"))
    assert isinstance(changed, Unavailable)
    await say_what_they_always_say(crowd, undisturbed)
    assert client.generate(PROMPT, SHORT)[0].weight_version == "0"
    await until_done(lambda: client.update_weights_from_disk("step-1", "two", "keep"))
    await operated.until_both(lambda worker: worker.weight_version == "two")
    await asyncio.to_thread(until, lambda: client.generate(PROMPT, SHORT)[0].weight_version == "two")
    wanted = await asyncio.to_thread(greedy_tokens, tmp_path / "folders" / "step-1")
    for _ in range(2):  # on either worker
        (after,) = client.generate(PROMPT, SHORT)
        assert (after.weight_version, after.outputs[0].token_ids) == ("two", wanted)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_service_is_killed_while_weights_are_swapped(
    swapping: Operated, undisturbed: dict[str, Said], victim: str, tmp_path: Path
) -> None:
    """All workers have the new weights then: requests sent meanwhile use only these, and streams continue with them."""
    client, new = swapping.client, tmp_path / "folders" / "step-1"
    wanted, old = [await asyncio.to_thread(greedy_tokens, folder) for folder in (new, new.with_name("model"))]
    assert wanted != old
    asked: list[asyncio.Future[list[RequestOutput]]] = []

    def ask() -> None:
        asked.append(asyncio.ensure_future(asyncio.to_thread(client.generate, PROMPT, SHORT)))

    switched = 0
    while not switched:  # on a machine that stands still, streams may be over before the swap begins
        crowd = Crowd(swapping.cluster.grpc_address, greedy, count=8)
        await crowd.all_streaming(1)
        swap = lambda: client.update_weights_from_disk("step-1", "one", "keep")  # noqa: E731
        swapped = await swapping.kill_amid(victim, swap, ask)
        assert isinstance(swapped, Unavailable) if victim == "scheduler-0" else swapped == "one"
        (meanwhile,) = await asked[-1]
        assert (meanwhile.weight_version, meanwhile.outputs[0].token_ids) == ("one", wanted)
        await crowd.finished()
        assert crowd.errors == []
        switched = await asyncio.to_thread(check_no_mixture, crowd, undisturbed["greedy"], new)
        await swapping.until_both(lambda worker: worker.weight_version == "one")
        await until_done(lambda: client.update_weights_from_disk("model", "two", "keep"))
        await swapping.until_both(lambda worker: worker.weight_version == "two")
    for _ in range(2):  # on either worker
        (after,) = client.generate(PROMPT, SHORT)
        assert (after.weight_version, after.outputs[0].token_ids) == ("two", old)
