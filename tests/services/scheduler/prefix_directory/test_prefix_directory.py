"""The prefix index in a real Redis: published, read by epoch, and complete again after every kind of failure."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from prometheus_client import CollectorRegistry

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.prefix_directory.directory import PrefixDirectory
from quire.services.scheduler.prefix_directory.registry import SchedulerRegistry
from quire.services.scheduler.prefix_directory.worker_index import WorkerIndex
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.sessions.worker_balancer import WorkerBalancer
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.kv.kv_specs import FULL, ONE_FULL, KVSpec, Window
from quire.shared.metrics.scheduler import DirectoryMetrics, SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.prefix_index import BlockKeys, PrefixReader, RegistryKeys, SchedulerEntry, connect
from tests.redis_server import RedisServer
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.reference_worker import ReferenceWorker
from tests.services.scheduler.scripted_peers import MODEL, layout
from tests.waiting import eventually

KEYS = BlockKeys.of("quire", MODEL, layout())
LIMITS = make_limits(num_blocks=40, block_size=4, enable_prefix_caching=True)
PROMPT = list(range(24))
HASHES = block_hash.chain(block_hash.root_hash(), i32_bytes(PROMPT), 4)


class Worker:
    """A core whose cache is published, and a reference worker that fills it."""

    def __init__(self, name: str, epoch: int, kv_specs: tuple[KVSpec, ...] = ONE_FULL) -> None:
        changes = BlockChanges()
        limits = replace(LIMITS, kv_specs=kv_specs)
        self.core = Core(limits, observer=changes)
        self.paper = ReferenceWorker(limits)
        self.replica = Replica(
            worker_pb2.WorkerHello(worker_id=name),
            epoch,
            self.core,
            send=lambda _: None,
            deliver=lambda _: None,
            clock=time.monotonic,
            call_soon=lambda _: None,
            call_later=lambda *_: None,
            metrics=SchedulerMetrics(CollectorRegistry()),
            changes=changes,
        )
        self._keys = iter(range(10_000))

    def compute(self, prompt: list[int]) -> None:
        self.core.add(make_sequence(next(self._keys), prompt, 1, block_size=4))
        while (plan := self.core.schedule(0)) is not None:
            result: StepResult = self.paper.execute(plan)
            self.core.apply(result, 0)


class Directory:
    """A running directory with a reader."""

    def __init__(self, url: str, scheduler: str = "s0") -> None:
        self.metrics = DirectoryMetrics(CollectorRegistry())
        client = connect(url)
        self.entry = SchedulerEntry(scheduler, f"{scheduler}:1", 1, 0)
        registry = SchedulerRegistry(client, RegistryKeys("quire"), lambda: self.entry)
        self.directory = PrefixDirectory(client, registry, scheduler, self.metrics)
        self.task = asyncio.ensure_future(self.directory.run())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Open = Callable[..., Directory]
Fill = Callable[[redis.asyncio.Redis], Awaitable[None]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path)
    running.start()
    yield running
    running.stop()


@pytest_asyncio.fixture
async def opened(server: RedisServer) -> AsyncIterator[Open]:
    directories: list[Directory] = []

    def begin(scheduler: str = "s0") -> Directory:
        directories.append(Directory(server.url, scheduler))
        return directories[-1]

    yield begin
    for directory in directories:
        await directory.close()


@pytest_asyncio.fixture
async def reader(server: RedisServer) -> AsyncIterator[PrefixReader]:
    client = connect(server.url)
    yield PrefixReader(client, KEYS)
    await client.aclose()


async def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        await eventually(holds)


async def matched(reader: PrefixReader) -> dict[str, int]:
    """Returns the matched blocks of PROMPT on each live worker; none while Redis is down."""
    try:
        matches = await reader.match(HASHES, await reader.workers())
    except redis.RedisError:
        return {"redis": -1}
    return {match.worker.id: match.num_blocks for match in matches}


async def becomes(reader: PrefixReader, expected: dict[str, int], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        await eventually(lambda: matched(reader), lambda found: found == expected)


async def test_cached_blocks_are_found_by_all_readers(opened: Open, reader: PrefixReader) -> None:
    first, second = Worker("w0", 10), Worker("w1", 11)
    directory = opened().directory
    directory.track(first.replica, KEYS)
    directory.track(second.replica, KEYS)
    first.compute(PROMPT)
    second.compute(PROMPT[:9])
    await becomes(reader, {"w0": 6, "w1": 2})
    workers = await reader.workers()
    assert [(w.id, w.epoch, w.scheduler) for w in workers] == [("w0", 10, "s0"), ("w1", 11, "s0")]
    for i in range(30):  # other prompts take all blocks of w0
        first.compute([1000 + i] * 8)
    await becomes(reader, {"w1": 2})
    await until(lambda: directory.num_entries == first.core.use.cached + second.core.use.cached)


async def _no_memory(client: redis.asyncio.Redis) -> None:
    await client.config_set("maxmemory", 1)


async def _no_room_for_its_dump(client: redis.asyncio.Redis) -> None:
    """Limits the dump process to zero bytes; from then on Redis rejects writes."""
    pid = (await client.info("server"))["process_id"]
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, most))
    await client.config_set("save", "3600 1")  # without any, a failure to save is ignored
    await client.bgsave()
    await eventually(lambda: client.info("persistence"), lambda found: found["rdb_last_bgsave_status"] != "ok")


async def _room_again(client: redis.asyncio.Redis) -> None:
    await client.config_set("maxmemory", 0)
    await client.config_set("stop-writes-on-bgsave-error", "no")


@pytest.mark.parametrize("fill", [_no_memory, _no_room_for_its_dump])
async def test_a_redis_without_memory_or_disk_counts_as_unavailable(
    server: RedisServer, opened: Open, reader: PrefixReader, caplog: pytest.LogCaptureFixture, fill: Fill
) -> None:
    worker, directory = Worker("w0", 10), opened().directory
    directory.track(worker.replica, KEYS)
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await fill(client)
        await until(lambda: directory.up is False)
        assert (await matched(reader)).get("w0", 0) in (0, 6)  # what is there can be read, until its lease ends
        await _room_again(client)
    await until(lambda: directory.up)
    await becomes(reader, {"w0": 6})
    assert caplog.text.count("redis does not serve") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("specs", [(Window(6),), (FULL, Window(6)), (FULL, FULL, Window(9))])
async def test_a_prefix_of_several_groups_has_the_schedulers_length(
    opened: Open, reader: PrefixReader, specs: tuple[KVSpec, ...]
) -> None:
    """Also after evictions. Blocks of several groups, and those outside a window, are distinguished."""
    worker, plain = Worker("w0", 10, specs), Worker("w1", 11)
    directory = opened().directory
    directory.track(worker.replica, KEYS)
    directory.track(plain.replica, KEYS)
    plain.compute(PROMPT[:9])
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6, "w1": 2})
    seen = set()
    for i in range(24):
        worker.compute([1000 + i] * 8)
        there = len(worker.core.kv.match(HASHES).blocks) // len(specs)
        seen.add(there)
        await becomes(reader, {"w0": there, "w1": 2} if there else {"w1": 2})
    assert len(seen) > 1, "something was evicted"


async def test_a_scheduler_stopped_during_a_send_deregisters(opened: Open) -> None:
    """Some Python versions lose a cancellation that arrives right after a send has completed."""
    first, second = opened(), opened("s1")
    pool = second.directory._redis.connection_pool

    class AskedMeanwhile(pool.connection_class):  # type: ignore[misc, name-defined]
        async def _send_packed_command(self, command: Iterable[bytes]) -> None:
            await super()._send_packed_command(command)
            if first.directory.peers and not second.task.cancelling():
                second.task.cancel()

    pool.connection_class = AskedMeanwhile
    await asyncio.wait([second.task], timeout=60)
    assert second.task.cancelled()
    await until(lambda: not first.directory.peers)


async def test_entries_of_a_detached_worker_are_removed(
    server: RedisServer, opened: Open, reader: PrefixReader
) -> None:
    worker = Worker("w0", 10)
    directory = opened().directory
    directory.track(worker.replica, KEYS)
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    directory.untrack(worker.replica)
    await becomes(reader, {})
    client = redis.asyncio.Redis.from_url(server.url)
    await eventually(lambda: client.keys("*blocks*"), lambda found: not found)
    assert await client.keys("*blocks*") == []
    await client.aclose()


async def test_workers_detached_during_a_removal_are_removed_too(
    opened: Open, reader: PrefixReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Worker("w0", 10), Worker("w1", 11)
    directory = opened().directory
    taken_out: list[str] = []
    withdraw = WorkerIndex.withdraw

    async def meanwhile(index: WorkerIndex, client: object) -> None:
        directory.untrack(second.replica)
        await withdraw(index, client)
        taken_out.append(index.replica.id)

    monkeypatch.setattr(WorkerIndex, "withdraw", meanwhile)
    for worker in (first, second):
        directory.track(worker.replica, KEYS)
        worker.compute(PROMPT)
    await becomes(reader, {"w0": 6, "w1": 6})
    directory.untrack(first.replica)
    await until(lambda: len(taken_out) == 2)
    assert taken_out == ["w0", "w1"]


async def test_only_the_current_epoch_counts(opened: Open, reader: PrefixReader) -> None:
    old, new = Worker("w0", 10), Worker("w0", 11)
    directory = opened().directory
    directory.track(old.replica, KEYS)
    old.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    directory.untrack(old.replica)
    directory.track(new.replica, KEYS)
    new.compute(PROMPT[:4])
    await becomes(reader, {"w0": 1})
    assert [w.epoch for w in await reader.workers()] == [11]


async def test_entries_of_a_dead_scheduler_expire(server: RedisServer, opened: Open, reader: PrefixReader) -> None:
    worker = Worker("w0", 10)
    opening = opened()
    opening.directory.track(worker.replica, KEYS)
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    client = redis.asyncio.Redis.from_url(server.url)
    leases = [
        await client.pttl(key) for key in await client.keys("*") if b"workers" not in key and b"schedulers" not in key
    ]
    await client.aclose()
    assert len(leases) == 3
    assert all(0 < lease <= 5000 for lease in leases), "all but the two name lists end by themselves"


@pytest.mark.parametrize("is_known", [False, True], ids=["all that a worker holds", "the first of it"])
async def test_entries_of_a_scheduler_killed_after_one_command_expire(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    async def never(*_: object, **__: object) -> bool:
        return True

    client = connect(server.url)
    worker = Worker("w0", 10)
    index = WorkerIndex(worker.replica, KEYS, "s0")
    if is_known:
        await index.publish(client, 5000, renew=True)
    monkeypatch.setattr(WorkerIndex, "_renew", never)
    worker.compute(PROMPT)
    await index.publish(client, 5000, renew=False)
    (key,) = await client.keys("*blocks*")
    assert await client.scard(key) == index.num_published == 6
    assert 0 < await client.pttl(key) <= 5000
    await client.aclose()


@pytest.mark.parametrize("trouble", ["stopped", "hanging", "restarted empty", "restored from an old dump"])
async def test_the_index_recovers_within_five_seconds(
    server: RedisServer, opened: Open, reader: PrefixReader, trouble: str
) -> None:
    worker = Worker("w0", 10)
    opening = opened()
    directory = opening.directory
    directory.track(worker.replica, KEYS)
    worker.compute([5] * 12)
    await until(lambda: directory.num_entries == 3)
    dump = server.save()
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    if trouble == "hanging":
        server.hang()
        await until(lambda: directory.up is False)
        worker.compute([77] * 8)
        server.resume()
    else:
        server.stop()
        await until(lambda: directory.up is False)
        worker.compute([77] * 8)
        if trouble == "restored from an old dump":
            server.restore(dump)
        server.start()
    await until(lambda: directory.up)
    await becomes(reader, {"w0": 6})
    await until(lambda: directory.num_entries == worker.core.use.cached)
    await until(lambda: directory.lag_s < 1)
    assert opening.metrics.errors._value.get() >= 1


async def test_a_redis_that_silently_lost_entries_is_noticed(
    server: RedisServer, opened: Open, reader: PrefixReader
) -> None:
    worker = Worker("w0", 10)
    directory = opened().directory
    directory.track(worker.replica, KEYS)
    worker.compute(PROMPT)
    await becomes(reader, {"w0": 6})
    client = redis.asyncio.Redis.from_url(server.url)
    await client.flushall()
    await client.aclose()
    await becomes(reader, {"w0": 6})


async def test_schedulers_discover_each_other(opened: Open) -> None:
    first, second = opened("s0").directory, opened("s1").directory
    await until(lambda: [p.id for p in first.peers] == ["s1"] and [p.id for p in second.peers] == ["s0"])


async def test_schedulers_notice_a_draining_peer(opened: Open) -> None:
    first, second = opened("s0"), opened("s1")
    await until(lambda: [p.draining for p in first.directory.peers] == [False])
    second.entry = replace(second.entry, draining=True)
    await until(lambda: first.directory.peers == [second.entry])


def test_workers_are_balanced_evenly() -> None:
    peers = [SchedulerEntry("s1", "s1:1", 1, 0), SchedulerEntry("s2", "s2:1", 1, 3)]
    balancer = WorkerBalancer(lambda: peers)
    assert balancer.redirect_target(0) is None
    assert [balancer.redirect_target(3) for _ in range(4)] == ["s1:1", "s1:1", "s1:1", None]
    peers = [SchedulerEntry("s1", "s1:1", 1, 3), SchedulerEntry("s2", "s2:1", 1, 3)]
    assert balancer.redirect_target(3) is None, "the registry has caught up"
    assert [balancer.drain_target() for _ in range(3)] == ["s1:1", "s2:1", "s1:1"]
    assert WorkerBalancer(lambda: []).drain_target() is None


def test_no_worker_is_redirected_to_a_draining_scheduler() -> None:
    leaving, staying = SchedulerEntry("s1", "s1:1", 1, 0, draining=True), SchedulerEntry("s2", "s2:1", 1, 3)
    peers = [leaving, staying]
    balancer = WorkerBalancer(lambda: peers)
    assert [balancer.redirect_target(5) for _ in range(3)] == ["s2:1", "s2:1", None]
    assert balancer.drain_target() == "s2:1"
    assert WorkerBalancer(lambda: [leaving]).drain_target() is None
    assert WorkerBalancer(lambda: [leaving]).redirect_target(5) is None


def test_changes_are_net_effects() -> None:
    changes = BlockChanges()
    changes.store(b"a" * 32)
    changes.store(b"b" * 32)
    changes.remove(b"a" * 32)
    changes.remove(b"c" * 32)
    changes.store(b"c" * 32)
    assert changes.take_changes() == ({b"b" * 8}, set())
    assert len(changes) == 0
