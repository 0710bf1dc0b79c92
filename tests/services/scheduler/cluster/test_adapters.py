"""Adapters are loaded and unloaded while a cluster runs: on all workers or none, and no sequence loses its adapter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from quire.services.scheduler.cluster.adapters import ClusterAdapters
from quire.services.scheduler.cluster.live_sequences import LiveSequences
from quire.services.scheduler.replicas.adapters import ReplicaAdapters
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2
from tests.admin import admin_of, calling
from tests.observing import calls_of
from tests.services.scheduler.reference_worker import oracle
from tests.services.scheduler.scripted_peers import FrontendPeer, WorkerPeer
from tests.services.scheduler.test_service import PROMPTS, SchedulerHarness, Start, start
from tests.waiting import eventually

__all__ = ["start"]

ONE, OTHER = b"1" * 32, b"2" * 32
PATIENCE_S = 60.0


async def worker(bench: SchedulerHarness, number: int = 0, **fields: Any) -> WorkerPeer:
    """Starts a worker that finds two adapters and can load some."""
    hello = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(max_adapters=fields.pop("room", 4)))
    hello.MergeFrom(fields.pop("hello", worker_pb2.WorkerHello()))
    return await bench.worker(**{"id": f"w{number}", "hello": hello, "digests": {"one": ONE, "other": OTHER}, **fields})


async def ask(bench: SchedulerHarness, method: str, request: Any) -> Any:
    async with calling(admin_of("scheduler", bench.address)) as admin:
        return await getattr(admin, method)(request)


async def load(
    bench: SchedulerHarness, name: str = "a", path: str = "one", *, replace: bool = False
) -> pb.LoadAdapterResponse:
    return await ask(bench, "LoadAdapter", pb.LoadAdapterRequest(name=name, path=path, replace=replace))


async def unload(bench: SchedulerHarness, name: str = "a") -> pb.UnloadAdapterResponse:
    return await ask(bench, "UnloadAdapter", pb.UnloadAdapterRequest(name=name))


async def listed(bench: SchedulerHarness) -> list[tuple[str, bytes, int, int, bool]]:
    answer = await ask(bench, "ListAdapters", pb.ListAdaptersRequest())
    return [(one.name, one.digest, one.num_workers, one.num_sequences, one.leaving) for one in answer.adapters]


def offered(frontend: FrontendPeer) -> dict[str, bytes]:
    digests = frontend.view.adapter_digests
    return {name: digests[32 * i : 32 * i + 32] for i, name in enumerate(frontend.view.adapters)}


async def counted(bench: SchedulerHarness) -> dict[str, float]:
    """Returns the number of load orders by outcome."""
    return await bench.counted("quire_scheduler_adapter_loads", "outcome")


async def until(condition: Any) -> None:
    await eventually(condition)


async def begin(frontend: FrontendPeer, stream: int, adapter: str = "a", digest: bytes = ONE, tokens: int = 20) -> None:
    await frontend.submit(stream, PROMPTS[stream], tokens, adapter=adapter, adapter_digest=digest, eos_token_ids=b"")


async def test_an_adapter_is_offered_once_every_worker_has_loaded_it(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, hold_loads=asyncio.Event())
    frontend = await bench.frontend()
    loading = asyncio.ensure_future(load(bench))
    await until(lambda: second.ordered)
    assert not loading.done()
    assert offered(frontend) == {}
    second.hold_loads.set()
    answer = await loading
    assert (answer.digest, answer.num_workers) == (ONE, 2)
    await until(lambda: offered(frontend) == {"a": ONE})
    assert first.ordered == second.ordered == ["load a"]
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 20, eos=False)
    assert await listed(bench) == [("a", ONE, 2, 0, False)]
    assert await counted(bench) == {"loaded": 2, "refused": 0, "lost": 0}


async def test_an_adapter_that_one_worker_refuses_is_unloaded_everywhere(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, digests={})
    with pytest.raises(grpc.aio.AioRpcError, match="w1: there is no one") as refused:
        await load(bench)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: first.ordered == ["load a", "unload a"])
    assert second.ordered == ["load a"]
    assert await listed(bench) == []
    assert await counted(bench) == {"loaded": 1, "refused": 1, "lost": 0}


async def test_different_adapter_contents_are_reported_by_worker(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, digests={"one": OTHER})
    with pytest.raises(grpc.aio.AioRpcError, match="workers read different contents from it: w0, w1"):
        await load(bench)
    await until(lambda: first.ordered == second.ordered == ["load a", "unload a"])


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (
            pb.LoadAdapterRequest(name="", path="one"),
            "INVALID_ARGUMENT",
            "lora_name: must have 1 to 256 printable characters",
        ),
        (
            pb.LoadAdapterRequest(name="a\n", path="one"),
            "INVALID_ARGUMENT",
            "lora_name: must have 1 to 256 printable characters",
        ),
        (pb.LoadAdapterRequest(name="b", path=""), "INVALID_ARGUMENT", "lora_path: '' must be the path of a folder"),
        (pb.LoadAdapterRequest(name="paper", path="one"), "INVALID_ARGUMENT", "'paper' is the name of the model"),
        (
            pb.LoadAdapterRequest(name="a", path="other"),
            "INVALID_ARGUMENT",
            "'a' is already loaded; replace it with load_inplace",
        ),
        (pb.UnloadAdapterRequest(name="b"), "NOT_FOUND", "the adapter 'b' does not exist"),
    ],
)
async def test_invalid_requests_are_refused(start: Start, request_: Any, code: str, text: str) -> None:
    bench = await start()
    peer = await worker(bench)
    await load(bench)
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await ask(bench, "LoadAdapter" if isinstance(request_, pb.LoadAdapterRequest) else "UnloadAdapter", request_)
    assert refused.value.code().name == code
    assert peer.ordered == ["load a"]


async def test_loading_is_refused_where_workers_cannot_load_adapters(start: Start) -> None:
    bench = await start()
    await bench.worker(hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE)))
    for call in (load(bench, "b"), unload(bench)):
        with pytest.raises(grpc.aio.AioRpcError, match="lora_folders: the workers were started without it") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.aio.AioRpcError, match=r"lora_folders: adapters can be loaded .*: off; into worker w1: on"):
        await worker(bench, 1)


async def test_a_worker_may_reattach_without_a_damaged_adapter(start: Start) -> None:
    """Its file was damaged meanwhile: the model and the other adapters stay, and the lost one is no longer offered."""
    bench = await start()
    both = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=ONE + OTHER))
    first = await bench.worker(hello=both)
    frontend = await bench.frontend()
    await until(lambda: offered(frontend) == {"a": ONE, "b": OTHER})
    first.task.cancel()
    await until(lambda: frontend.view.num_workers == 0)
    await begin(frontend, 0, "b", OTHER)
    await bench.worker(hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE)))
    await until(lambda: offered(frontend) == {"a": ONE})
    await begin(frontend, 1)
    await frontend.ended(0, 1)
    assert frontend.finished[0].error.code == finish_pb2.ERROR_CODE_NOT_FOUND
    assert not frontend.finished[1].HasField("error")
    with pytest.raises(grpc.aio.AioRpcError, match="'a' has another content"):
        await bench.worker(
            id="w1", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=OTHER))
        )


async def test_sequences_are_placed_where_their_adapter_is_loaded(start: Start) -> None:
    """Neither of two workers can load adapters, and one of them lacks a damaged one."""
    bench = await start()
    both = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=ONE + OTHER))
    whole = await bench.worker(id="w0", hello=both)
    await bench.worker(id="w1", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE)))
    frontend = await bench.frontend()
    await until(lambda: frontend.view.num_workers == 2)
    assert offered(frontend) == {"a": ONE, "b": OTHER}
    for stream in range(4):
        await begin(frontend, stream, "b", OTHER)
    await frontend.ended(0, 1, 2, 3)
    assert not any(end.HasField("error") for end in frontend.finished.values())
    assert whole.ordered == []


async def test_a_worker_with_a_damaged_adapter_may_attach_first(start: Start) -> None:
    """A scheduler that has just started knows no other worker: the next one adds what the first one lacks."""
    bench = await start()
    await bench.worker(id="w0", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE)))
    frontend = await bench.frontend()
    await until(lambda: offered(frontend) == {"a": ONE})
    both = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=ONE + OTHER))
    whole = await bench.worker(id="w1", hello=both)
    await until(lambda: offered(frontend) == {"a": ONE, "b": OTHER})
    for stream in range(3):
        await begin(frontend, stream, "b", OTHER)
    await frontend.ended(0, 1, 2)
    assert not any(end.HasField("error") for end in frontend.finished.values())
    assert whole.ordered == []
    with pytest.raises(grpc.aio.AioRpcError, match="'b' has another content: the cluster has"):
        await bench.worker(
            id="w2", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["b"], digests=ONE))
        )


async def test_a_first_worker_without_adapters_accepts_those_of_the_next(start: Start) -> None:
    bench = await start()
    await bench.worker(id="w0")
    await bench.worker(id="w1", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE)))
    frontend = await bench.frontend()
    await until(lambda: offered(frontend) == {"a": ONE})
    await begin(frontend, 0, "a", ONE)
    await frontend.ended(0)
    assert not frontend.finished[0].HasField("error")


async def test_loading_without_workers_is_unavailable(start: Start) -> None:
    bench = await start()
    with pytest.raises(grpc.aio.AioRpcError, match="no worker is attached that could load") as refused:
        await load(bench)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_unknown_adapter_is_not_found(start: Start) -> None:
    bench = await start()
    await worker(bench)
    frontend = await bench.frontend()
    await begin(frontend, 0, "nobody")
    await begin(frontend, 1)
    await frontend.ended(0, 1)
    assert {end.error.code for end in frontend.finished.values()} == {finish_pb2.ERROR_CODE_NOT_FOUND}
    assert frontend.finished[0].error.message == "The model `nobody` does not exist."


async def test_an_unloaded_adapter_stays_for_its_sequences(start: Start) -> None:
    bench = await start()
    hold = asyncio.Event()
    peer = await worker(bench, hold=hold)
    frontend = await bench.frontend()
    await load(bench)
    await begin(frontend, 0)
    await until(lambda: frontend.view.num_running == 1)
    assert (await unload(bench)).num_sequences == 1
    await until(lambda: offered(frontend) == {})
    assert await listed(bench) == [("a", ONE, 1, 1, True)]
    assert peer.ordered == ["load a"]
    hold.set()
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 20, eos=False)
    await until(lambda: peer.ordered == ["load a", "unload a"])
    assert await listed(bench) == []
    await begin(frontend, 1)
    await frontend.ended(1)
    assert frontend.finished[1].error.code == finish_pb2.ERROR_CODE_NOT_FOUND


async def test_a_replacement_serves_new_sequences_only(start: Start) -> None:
    bench = await start()
    hold = asyncio.Event()
    peer = await worker(bench, hold=hold, reads_on=True)
    frontend = await bench.frontend()
    await load(bench)
    await begin(frontend, 0)
    await until(lambda: frontend.view.num_running == 1)
    await load(bench, path="other", replace=True)
    await until(lambda: offered(frontend) == {"a": OTHER})
    await begin(frontend, 1, digest=OTHER)
    await until(lambda: frontend.view.num_running + frontend.view.num_waiting == 2)
    assert await listed(bench) == [("a", ONE, 1, 1, True), ("a", OTHER, 1, 1, False)]
    hold.set()
    await frontend.ended(0, 1)
    assert not any(end.HasField("error") for end in frontend.finished.values())
    await until(lambda: peer.ordered == ["load a", "load a", "unload a"])
    assert await listed(bench) == [("a", OTHER, 1, 0, False)]


async def test_a_late_worker_loads_adapters_without_blocking_other_sequences(start: Start) -> None:
    """Sequences that need the adapter wait for the worker that loads it; others run there at once."""
    bench = await start()
    first = await worker(bench, 0)
    frontend = await bench.frontend()
    await load(bench)
    first.task.cancel()
    loads = asyncio.Event()
    second = await worker(bench, 1, hold_loads=loads)
    await until(lambda: second.ordered == ["load a"])
    await begin(frontend, 0)
    await frontend.submit(1, PROMPTS[1], 20, eos_token_ids=b"")
    await frontend.ended(1)
    assert not frontend.tokens[0]
    assert 0 not in frontend.finished
    loads.set()
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 20, eos=False)


async def test_sequences_continue_on_a_worker_with_their_adapter(start: Start) -> None:
    """One of two other workers cannot load it."""
    bench = await start()
    first = await worker(bench, 0, step_s=0.02)
    frontend = await bench.frontend()
    await load(bench)
    await begin(frontend, 0, tokens=40)
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    without = await worker(bench, 1, digests={})
    await until(lambda: without.ordered == ["load a"])
    second = await worker(bench, 2)
    await until(lambda: second.ordered == ["load a"])
    first.task.cancel()
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 40, eos=False)
    assert (await bench.status())["w1"].work.generated_tokens == 0


async def test_a_worker_lost_during_a_load_is_not_waited_for(start: Start) -> None:
    bench = await start()
    await worker(bench, 0)
    second = await worker(bench, 1, hold_loads=asyncio.Event())
    loading = asyncio.ensure_future(load(bench))
    await until(lambda: second.ordered)
    second.task.cancel()
    assert (await loading).num_workers == 1
    again = await worker(bench, 1)
    await until(lambda: again.ordered == ["load a"])


async def test_a_load_fails_when_all_workers_are_lost(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_loads=asyncio.Event())
    loading = asyncio.ensure_future(load(bench))
    await until(lambda: peer.ordered)
    peer.task.cancel()
    with pytest.raises(grpc.aio.AioRpcError, match="have disconnected") as refused:
        await loading
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    again = await worker(bench)
    assert await listed(bench) == []
    assert again.ordered == []
    assert await counted(bench) == {"loaded": 0, "refused": 0, "lost": 1}


async def test_a_cancelled_load_is_undone(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_loads=asyncio.Event())
    loading = asyncio.ensure_future(load(bench))
    await until(lambda: peer.ordered)
    loading.cancel()
    await asyncio.wait([loading])
    other = asyncio.ensure_future(load(bench, "b", "other"))
    await until(lambda: "load b" in peer.ordered)  # one after the other: by now the scheduler has heard that it ends
    peer.hold_loads.set()
    assert (await other).num_workers == 1
    await until(lambda: peer.ordered == ["load a", "load b", "unload a"])
    assert await listed(bench) == [("b", OTHER, 1, 0, False)]
    assert (await load(bench)).num_workers == 1


async def test_the_outcome_of_a_cancelled_load_does_not_undo_the_next(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_loads=asyncio.Event())
    given_up = asyncio.ensure_future(load(bench))
    await until(lambda: peer.ordered)
    given_up.cancel()
    await asyncio.wait([given_up])
    again = asyncio.ensure_future(load(bench))
    await until(lambda: len(peer.ordered) == 2)
    peer.hold_loads.set()
    assert (await again).num_workers == 1
    await load(bench, "b")
    assert peer.ordered == ["load a", "load a", "load b"]


@dataclass(eq=False)
class Alone:
    """A worker's part of ClusterAdapters, whose answers arrive when the test says so."""

    sent: list[str] = field(default_factory=list)
    id: str = "w"
    leaving: bool = False
    hello: worker_pb2.WorkerHello = field(
        default_factory=lambda: worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(max_adapters=4))
    )
    core: Any = None

    def __post_init__(self) -> None:
        self.adapters = ReplicaAdapters(self.hello, self._send, lambda outcome: None)

    def _send(self, message: worker_pb2.AttachResponse) -> None:
        self.sent.append(str(message.WhichOneof("message")))

    def loaded(self, order_id: int, digest: bytes = ONE) -> None:
        self.adapters.receive_loaded(worker_pb2.AdapterLoaded(order_id=order_id, digest=digest))


@pytest.mark.parametrize("first", [ONE, OTHER])
async def test_the_answer_to_a_cancelled_load_may_arrive_last(first: bytes) -> None:
    """It arrives together with the answer to the next load, which has not been processed; the folder may have changed
    in between."""
    alone = Alone()
    adapters = ClusterAdapters({"w": alone}, num_users=lambda _: 0, used_by=lambda _: (), on_loaded=lambda: None)
    request = pb.LoadAdapterRequest(name="a", path="one")
    given_up = asyncio.ensure_future(adapters.load(request, "model"))
    await until(lambda: len(alone.sent) == 1)
    given_up.cancel()
    await asyncio.wait([given_up])
    again = asyncio.ensure_future(adapters.load(request, "model"))
    await until(lambda: len(alone.sent) == 2)
    alone.loaded(2)
    alone.loaded(1, first)
    assert (await again).digest == ONE
    assert [*alone.adapters.loaded] == [AdapterId("a", ONE)]
    assert alone.sent == ["load_adapter"] * 2 + ["unload_adapter"] * (first != ONE)


async def test_an_adapter_unloaded_while_a_new_worker_loads_it_is_unloaded_there(start: Start) -> None:
    bench = await start()
    await worker(bench, 0)
    await load(bench)
    late = await worker(bench, 1, hold_loads=asyncio.Event())
    await until(lambda: late.ordered)
    await unload(bench)
    late.hold_loads.set()
    await until(lambda: late.ordered == ["load a", "unload a"])
    assert await listed(bench) == []


async def test_a_new_scheduler_adopts_the_workers_adapters(start: Start) -> None:
    """Workers that lack some load them."""
    bench = await start()
    has = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=ONE, paths=["one"]))
    other = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["b"], digests=OTHER, paths=["other"]))
    first, second = await worker(bench, 0, hello=has), await worker(bench, 1, hello=other)
    frontend = await bench.frontend()
    await until(lambda: offered(frontend) == {"a": ONE, "b": OTHER})
    await until(lambda: first.ordered and second.ordered)
    assert (first.ordered, second.ordered) == (["load b"], ["load a"])


async def test_a_worker_that_missed_changes_is_updated(start: Start) -> None:
    """It still has what was unloaded, and the old content of what was replaced."""
    bench = await start()
    await worker(bench, 0)
    await load(bench, "a", "one")
    await load(bench, "b", "one")
    await unload(bench, "a")
    await load(bench, "b", "other", replace=True)
    stale = worker_pb2.WorkerHello(
        lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=ONE + ONE, paths=["one", "one"])
    )
    late = await worker(bench, 1, hello=stale)
    await until(lambda: sorted(late.ordered) == ["load b", "unload a", "unload b"])
    assert await listed(bench) == [("b", OTHER, 2, 0, False)]


async def test_a_sequence_ends_when_no_worker_can_load_its_adapter(start: Start) -> None:
    bench = await start()
    first = await worker(bench, 0)
    frontend = await bench.frontend()
    await load(bench)
    first.task.cancel()
    await until(lambda: frontend.view.num_workers == 0)
    await begin(frontend, 0)
    await worker(bench, 1, digests={"one": OTHER})
    await frontend.ended(0)
    assert frontend.finished[0].error.code == finish_pb2.ERROR_CODE_NOT_FOUND


async def test_an_unexpected_answer_ends_the_workers_session(start: Start) -> None:
    bench = await start()
    peer = await worker(bench)
    loaded = worker_pb2.AdapterLoaded(order_id=9, digest=ONE)
    peer.link.send(worker_pb2.AttachRequest(adapter_loaded=loaded))
    with pytest.raises(grpc.aio.AioRpcError, match="the scheduler awaits no adapter 9"):
        await peer.task


async def test_users_are_counted_only_while_an_adapter_is_unloading(start: Start) -> None:
    """Walking all sequences is only necessary for adapters that are being unloaded."""
    bench = await start()
    with calls_of(LiveSequences.num_users) as counts:
        await worker(bench)
        frontend = await bench.frontend()
        await load(bench)
        await begin(frontend, 0)
        await frontend.ended(0)
    assert not counts


async def test_adapters_beyond_the_slots_take_turns(start: Start) -> None:
    """The least recently used one is unloaded, and loaded again when a request needs it."""
    bench = await start()
    peer = await worker(bench, room=2)
    frontend = await bench.frontend()
    for name, path in (("a", "one"), ("b", "other")):
        await load(bench, name, path)
    await begin(frontend, 0, "a", ONE)
    await frontend.ended(0)
    await load(bench, "c", "one")
    assert peer.ordered == ["load a", "load b", "unload b", "load c"]
    await until(lambda: offered(frontend) == {"a": ONE, "b": OTHER, "c": ONE})
    await begin(frontend, 1, "b", OTHER)
    await frontend.ended(1)
    assert frontend.tokens[1] == oracle(PROMPTS[1], len(PROMPTS[1]) + 20, eos=False)
    assert peer.ordered[4:] == ["unload a", "load b"]
    assert peer.digests_asked[-1] == OTHER


async def test_a_sequence_waiting_for_a_slot_precedes_later_users_of_it(start: Start) -> None:
    """Running users keep their adapter, and sequences without an adapter are not affected."""
    bench = await start()
    hold = asyncio.Event()
    peer = await worker(bench, room=1, hold=hold, reads_on=True)
    frontend = await bench.frontend()
    await load(bench, "a", "one")
    await load(bench, "b", "other")
    assert peer.ordered == ["load a", "unload a", "load b"]
    await begin(frontend, 0, "b", OTHER)
    await until(lambda: frontend.view.num_running == 1)
    await begin(frontend, 1, "a", ONE)
    await begin(frontend, 2, "b", OTHER)
    await frontend.submit(3, PROMPTS[3], 20, eos_token_ids=b"")
    await until(lambda: (frontend.view.num_running, frontend.view.num_waiting) == (1, 3))
    assert peer.ordered == ["load a", "unload a", "load b"]
    hold.set()
    await frontend.ended(0, 1, 2, 3)
    for i in range(4):
        assert frontend.tokens[i] == oracle(PROMPTS[i], len(PROMPTS[i]) + 20, eos=False)
    assert peer.ordered[3:] == ["unload b", "load a", "unload a", "load b"]


async def test_a_worker_with_all_slots_in_use_loads_no_more(start: Start) -> None:
    bench = await start()
    hold = asyncio.Event()
    peer = await worker(bench, room=1, hold=hold, reads_on=True)
    frontend = await bench.frontend()
    await load(bench)
    await begin(frontend, 0)
    await until(lambda: frontend.view.num_running == 1)
    with pytest.raises(grpc.aio.AioRpcError, match=r"w0: all 1 adapter slots \(max_loras\) are in use") as refused:
        await load(bench, "b", "other")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peer.ordered == ["load a"]
    hold.set()
    await frontend.ended(0)
    await load(bench, "b", "other")
    assert await listed(bench) == [("a", ONE, 0, 0, False), ("b", OTHER, 1, 0, False)]
