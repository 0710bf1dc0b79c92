"""The scheduler's service over real gRPC, with scripted peers on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from quire.services.scheduler import main
from quire.services.scheduler.cluster.assignments import Assignments
from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.beam_search import BeamRules
from quire.services.scheduler.operations import status as status_module
from quire.services.scheduler.replicas.replica import Replica
from quire.shared import columns
from quire.shared.errors import Unavailable
from quire.shared.kv import block_hash
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import finish_pb2, model_pb2, sampling_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.process import lifecycle
from quire.shared.rpc.server import LIVENESS
from quire.shared.rpc.silence import SILENCE_FACTOR
from quire.shared.settings import SchedulerSettings
from tests.admin import admin_of, calling
from tests.observing import ObservedCall, calls_of
from tests.services.scheduler.conftest import make_limits
from tests.services.scheduler.core.beam.test_beams import exhaustive
from tests.services.scheduler.reference_worker import EOS, VOCAB, oracle
from tests.services.scheduler.scripted_peers import HEARTBEATS, FrontendPeer, WorkerPeer, layout
from tests.waiting import eventually, loop_turns

LIMITS = make_limits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)
PROMPTS = [[7, i, 3, i, i + 1, 9, 2, 8, 1] for i in range(8)]


class SchedulerHarness:
    """A running scheduler and its peers."""

    def __init__(self, address: str, metrics: str) -> None:
        self.address, self.metrics = address, metrics
        self.tasks: list[asyncio.Task[None]] = []
        self.frontends: list[FrontendPeer] = []

    async def worker(self, **fields: object) -> WorkerPeer:
        peer = WorkerPeer(self.address, fields.pop("limits", LIMITS), **fields)  # type: ignore[arg-type]
        peer.task = asyncio.ensure_future(peer.run())  # type: ignore[attr-defined]
        self.tasks.append(peer.task)  # type: ignore[attr-defined]
        await asyncio.wait([peer.task, asyncio.ensure_future(peer.attached.wait())], return_when="FIRST_COMPLETED")  # type: ignore[attr-defined]
        if not peer.attached.is_set():  # one that was may have ended since
            peer.task.result()  # type: ignore[attr-defined]
        return peer

    async def frontend(self) -> FrontendPeer:
        peer = FrontendPeer(self.address)
        await peer.open()
        self.frontends.append(peer)
        return peer

    async def status(self) -> dict[str, admin_pb2.ServiceStatus]:
        async with calling(admin_of("scheduler", self.address)) as admin:
            return {s.id: s for s in (await admin.GetStatus(admin_pb2.GetStatusRequest())).services}

    async def counted(self, name: str, label: str) -> dict[str, float]:
        """Returns a counter of the metrics page by the values of its only label."""
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"http://{self.metrics}/metrics")).text
        (family,) = [family for family in text_string_to_metric_families(page) if family.name == name]
        return {sample.labels[label]: sample.value for sample in family.samples if sample.name == f"{name}_total"}

    async def until_idle(self, worker: str) -> None:
        """Waits until no block is used: a finished sequence's blocks are released with the last step that names its
        slot."""
        await eventually(self.status, lambda found: not found[worker].blocks.used)

    async def close(self) -> None:
        for peer in self.frontends:
            await peer.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


Start = Callable[..., "asyncio.Future[SchedulerHarness]"]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    running: list[tuple[SchedulerHarness, lifecycle.Shutdown, asyncio.Task[None]]] = []

    async def begin(**fields: object) -> SchedulerHarness:
        announced: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        values = {"id": "s0", "grpc_port": 0, "metrics_port": 0, "drain_timeout_s": 5, **HEARTBEATS}
        settings = SchedulerSettings(**(values | fields))
        shutdown = lifecycle.Shutdown()
        task = asyncio.ensure_future(
            main.serve(settings, shutdown, lambda _role, _name, **where: announced.set_result(where))
        )
        where = await announced
        bench = SchedulerHarness(where["grpc"], where["metrics"])
        bench.shutdown, bench.served = shutdown, task  # type: ignore[attr-defined]
        running.append((bench, shutdown, task))
        return bench

    yield begin  # type: ignore[misc]
    for bench, shutdown, task in running:
        await bench.close()
        shutdown.request()
        await task


async def test_sequences_finish_with_the_text_of_the_oracle(start: Start) -> None:
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    for i, prompt in enumerate(PROMPTS):
        await frontend.submit(i, prompt, max_tokens=20)
    await frontend.ended(*range(len(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        assert frontend.tokens[i] == oracle(prompt, len(prompt) + 20, eos=True)
    await bench.until_idle("w0")
    status = await bench.status()
    assert status["s0"].work.generated_tokens == sum(map(len, frontend.tokens.values()))


async def test_submissions_in_one_message_are_all_accepted(start: Start) -> None:
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    for i, prompt in enumerate(PROMPTS):
        await frontend.submit(i, prompt, max_tokens=20, behind_the_last=True)
    await frontend.ended(*range(len(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        assert frontend.tokens[i] == oracle(prompt, len(prompt) + 20, eos=True)
    assert frontend.num_submissions_sent == 1


async def most_in_a_turn(counted: list[ObservedCall], happened: Callable[[], bool]) -> int:
    """Returns the maximum growth of `counted` in one turn of the event loop, which the scheduler shares."""
    most = before = 0
    async with asyncio.timeout(60):
        while not happened():
            await loop_turns()
            most, before = max(most, len(counted) - before), len(counted)
    return most


@pytest.mark.parametrize("together", [1, 4000])
async def test_a_large_message_is_processed_over_several_turns(start: Start, together: int) -> None:
    bench = await start()
    hold = asyncio.Event()  # no sequence ends by itself
    await bench.worker(hold=hold)
    flood, other = await bench.frontend(), await bench.frontend()
    await flood.until(lambda: flood.view.num_workers)
    for first in range(0, 4000, together):
        await flood.submit(first, PROMPTS[0], behind_the_last=True, num_sequences=together)
    assert flood.num_submissions_sent == 1
    with calls_of(WorkerCluster.cancel, Assignments.place) as counted:
        assert await most_in_a_turn(counted, lambda: len(counted) == 4000) <= 70
        await other.submit(0, PROMPTS[1])
        counted.clear()
        await flood.close()
        assert await most_in_a_turn(counted, lambda: len(counted) > 3500) <= 70
    hold.set()
    await other.ended(0)


async def test_tokens_outside_the_vocabulary_are_refused(start: Start) -> None:
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    for stream, token in enumerate((VOCAB, -1)):
        await frontend.submit(stream, [1, token, 2])
    await frontend.submit(2, [1, VOCAB - 1, 2])
    await frontend.ended(0, 1, 2)
    errors = [frontend.finished[stream].error.message for stream in range(3)]
    assert errors == [
        *(f"token_ids: {token} is not in the vocabulary of {VOCAB} tokens" for token in (VOCAB, -1)),
        "",
    ]


async def test_samples_of_one_prompt_go_to_one_worker_and_compute_it_once(start: Start) -> None:
    bench = await start()
    workers = [await bench.worker(id=f"w{i}") for i in range(2)]
    frontend = await bench.frontend()
    prompt = list(range(30))
    await frontend.submit(0, prompt, max_tokens=20, num_sequences=5)
    await frontend.ended(*range(5))
    expected = oracle(prompt, 50, eos=True)
    assert all(frontend.tokens[i] == expected for i in range(5))
    computed = sorted(worker.paper.num_computed_tokens for worker in workers)
    assert computed == [0, 30 + 4 + 5 * (len(expected) - 1)]


async def test_a_beam_search_continues_when_its_worker_is_lost(start: Start) -> None:
    bench = await start()
    first = await bench.worker(id="w0")
    first.stand_still_after(10)
    frontend = await bench.frontend()
    prompt = list(range(9))
    search = sampling_pb2.BeamSearch(width=4, length_penalty=0.5)
    await frontend.submit(3, prompt, max_tokens=30, num_sequences=2, beam_search=search, num_logprobs=2)
    await frontend.until(lambda: frontend.view.num_running == 4)
    await frontend.until(lambda: 0.01 < frontend.view.kv_cache_usage < 1)
    assert set(frontend.cached) == {3, 4}
    first.call.cancel()
    await bench.worker(id="w1")
    await frontend.ended(3, 4)
    rules = BeamRules(4, 2, 30, frozenset([EOS]), length_penalty=0.5)
    for stream, (said, score, _) in zip((3, 4), exhaustive(prompt, rules), strict=True):
        assert frontend.tokens[stream] == said
        assert frontend.finished[stream].score == pytest.approx(score, abs=1e-4)
    await bench.until_idle("w1")


async def test_sequences_wait_for_the_first_worker(start: Start) -> None:
    bench = await start()
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0])
    await frontend.until(lambda: frontend.view.num_waiting == 1)
    assert frontend.view.num_workers == 0
    await bench.worker()
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 8, eos=True)
    await frontend.until(lambda: frontend.view.num_workers == 1)
    assert frontend.view.layout.block_size == 4


async def test_sequences_of_a_lost_worker_continue_elsewhere(start: Start) -> None:
    bench = await start()
    first = await bench.worker(id="w0", step_s=0.01)
    frontend = await bench.frontend()
    for i, prompt in enumerate(PROMPTS):
        await frontend.submit(i, prompt, max_tokens=60)
    await frontend.until(lambda: all(len(frontend.tokens[i]) >= 3 for i in range(len(PROMPTS))))
    first.call.cancel()
    await bench.worker(id="w1")
    await frontend.ended(*range(len(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        assert frontend.tokens[i] == oracle(prompt, len(prompt) + 60, eos=True)
    assert set(await bench.status()) == {"s0", "w1", "f0"}


async def test_an_error_of_one_workers_steps_ends_its_attachment_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised in a callback that is not awaited; status updates continue, and the sequence continues
    elsewhere."""
    bench = await start()
    first, frontend, schedule = await bench.worker(id="w0", step_s=0.01), await bench.frontend(), Core.schedule
    num_errors = 0

    def fails_once(core: Core, now: float) -> object:
        nonlocal num_errors
        if len(core.waiting) and not num_errors:
            num_errors += 1
            raise ValueError("some bug")
        return schedule(core, now)

    monkeypatch.setattr(Core, "schedule", fails_once)
    await frontend.submit(0, PROMPTS[0], max_tokens=20)
    await frontend.until(lambda: frontend.view.num_workers == 0)
    await asyncio.gather(first.task, return_exceptions=True)  # type: ignore[attr-defined]
    await bench.worker(id="w1")
    await frontend.ended(0)
    assert num_errors == 1
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 20, eos=True)


async def test_a_hanging_worker_is_detached_and_its_late_result_refused(start: Start) -> None:
    bench = await start(step_deadline_s=1.0)
    hung = await bench.worker(id="w0", hold=asyncio.Event())
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0])
    await bench.worker(id="w1")
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 8, eos=True)
    again = await bench.worker(id="w0")
    assert again.epoch > hung.epoch


async def test_a_result_of_another_epoch_ends_the_session(start: Start) -> None:
    bench = await start()
    worker = await bench.worker()
    frontend = await bench.frontend()
    worker.epoch -= 1
    worker.wrong = True
    await frontend.submit(0, PROMPTS[0])
    with pytest.raises(grpc.aio.AioRpcError, match="epoch: the scheduler is at"):
        await worker.task  # type: ignore[attr-defined]


async def test_an_idle_worker_stays_attached_while_it_sends_heartbeats(start: Start) -> None:
    bench = await start(heartbeat_interval_ms=50)
    worker = await bench.worker(heartbeat_s=0.05)
    await eventually(lambda: worker.num_heartbeats >= 3 * SILENCE_FACTOR)
    assert not worker.task.done()  # type: ignore[attr-defined]
    assert (await bench.status())["w0"].epoch == worker.epoch


async def test_a_worker_that_attaches_again_ends_its_old_session(start: Start) -> None:
    bench = await start()
    old = await bench.worker()
    new = await bench.worker()
    with pytest.raises(grpc.aio.AioRpcError, match="attached again"):
        await old.task  # type: ignore[attr-defined]
    assert new.epoch > old.epoch
    assert list(await bench.status()) == ["s0", "w0"]


async def test_blocks_kept_by_a_worker_are_hit_at_once(start: Start) -> None:
    bench = await start()
    hashes = block_hash.chain(block_hash.root_hash(), columns.i32_bytes(PROMPTS[0]), 4)
    kept = worker_pb2.WorkerHello(
        held=worker_pb2.HeldBlocks(block_ids=columns.u32_bytes([5, 9]), block_hashes=b"".join(hashes))
    )
    worker = WorkerPeer(bench.address, LIMITS, hello=kept)
    bench.tasks.append(asyncio.ensure_future(worker.run()))
    await worker.attached.wait()
    digests = [PROMPTS[0][: i + 1] for i in range(8)]
    worker.paper.adopt([5, 9], digests)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0])
    await frontend.ended(0)
    assert frontend.cached[0] == 8
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 8, eos=True)


async def test_blocks_of_a_gone_frontend_are_released(start: Start) -> None:
    bench = await start()
    await bench.worker(step_s=0.02)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=150, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    await frontend.close()
    bench.frontends.clear()
    await bench.until_idle("w0")
    assert (await bench.status())["s0"].running == 0


async def test_a_cancelled_sequence_ends_once_with_the_reason_given(start: Start) -> None:
    bench = await start()
    await bench.worker(step_s=0.01)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=150, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    await frontend.cancel(0, reason=finish_pb2.FINISH_REASON_STOP)
    await frontend.cancel(0)
    await frontend.ended(0)
    assert frontend.finished[0].reason == finish_pb2.FINISH_REASON_STOP


async def test_a_deadline_expires_with_and_without_a_worker(start: Start) -> None:
    bench = await start()
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], timeout_ms=100)
    await frontend.ended(0)
    await bench.worker(step_s=0.05)
    await frontend.submit(1, PROMPTS[1], max_tokens=150, eos_token_ids=b"", timeout_ms=300)
    await frontend.ended(1)
    for stream in (0, 1):
        assert frontend.finished[stream].reason == finish_pb2.FINISH_REASON_DEADLINE
        assert frontend.finished[stream].error.code == finish_pb2.ERROR_CODE_DEADLINE_EXCEEDED


async def test_sequences_of_a_leaving_worker_move(start: Start) -> None:
    bench = await start()
    leaving = await bench.worker(id="w0", step_s=0.01)
    frontend = await bench.frontend()
    for i, prompt in enumerate(PROMPTS):
        await frontend.submit(i, prompt, max_tokens=60)
    await frontend.until(lambda: all(len(frontend.tokens[i]) >= 3 for i in range(len(PROMPTS))))
    await bench.worker(id="w1")
    await leaving.leave()
    await leaving.task  # type: ignore[attr-defined]
    await frontend.ended(*range(len(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        assert frontend.tokens[i] == oracle(prompt, len(prompt) + 60, eos=True)


async def test_the_only_worker_finishes_running_sequences_before_it_leaves(start: Start) -> None:
    bench = await start()
    leaving = await bench.worker(step_s=0.01)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=30, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    await leaving.leave()
    await leaving.task  # type: ignore[attr-defined]
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 30, eos=False)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (worker_pb2.WorkerHello(model=model_pb2.ModelIdentity(vocab_size=51)), "model.vocab_size: .*50.*51"),
        (worker_pb2.WorkerHello(model=model_pb2.ModelIdentity(name="other")), "model.name: .*'paper'.*'other'"),
        (worker_pb2.WorkerHello(layout=layout(8)), "layout.block_size: the cluster has 4, worker w1 has 8"),
        (worker_pb2.WorkerHello(layout=model_pb2.BlockLayout(hash_scheme="md5")), "layout.hash_scheme"),
        (
            worker_pb2.WorkerHello(sampling=worker_pb2.SamplingSupport(logprobs_mode="raw_logits")),
            "logprobs_mode: the cluster has raw_logprobs, .*raw_logits",
        ),
        (
            worker_pb2.WorkerHello(
                sampling=worker_pb2.SamplingSupport(structured_output_backends=["xgrammar", "outlines-core"])
            ),
            "structured_output_backends: the cluster has llguidance, worker w1 has xgrammar, outlines-core",
        ),
        (
            worker_pb2.WorkerHello(kv_cache=worker_pb2.KVCache(groups=[{"full": {}}, {"window": {"length": 64}}])),
            r"kv_groups: the cluster has \[full\], worker w1 has \[full, window\(64\)\]",
        ),
        (
            worker_pb2.WorkerHello(kv_cache=worker_pb2.KVCache(groups=[{"state": {}}])),
            r"kv_groups\[0\].state.num_bytes: worker w1 has 0",
        ),
        (
            worker_pb2.WorkerHello(held=worker_pb2.HeldBlocks(block_groups=b"1234")),
            "held_block_groups: worker w1 sent 4 bytes for 0 blocks",
        ),
        (
            worker_pb2.WorkerHello(held=worker_pb2.HeldBlocks(host_place_groups=b"12345678")),
            "held_place_groups: worker w1 sent 8 bytes for 0 blocks",
        ),
        (
            worker_pb2.WorkerHello(
                kv_cache=worker_pb2.KVCache(num_host_blocks=2),
                held=worker_pb2.HeldBlocks(
                    host_place_ids=bytes(4), host_place_hashes=bytes(32), host_place_groups=b"\1\0\0\0"
                ),
            ),
            "held_place_groups: worker w1 has 1 groups, and sent 1",
        ),
        (
            worker_pb2.WorkerHello(sampling=worker_pb2.SamplingSupport(batch_invariant=True)),
            "batch_invariant: the cluster has off, worker w1 has on",
        ),
        (
            worker_pb2.WorkerHello(weights_state=worker_pb2.WeightsState(weights_digest=b"short")),
            "weights_digest: worker w1 sent 5 bytes; 32 are a digest",
        ),
        (
            worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a"], digests=b"short")),
            "adapter_digests: worker w1 sent 5 bytes of digests for 1 adapters",
        ),
        (
            worker_pb2.WorkerHello(limits=worker_pb2.StepLimits(max_num_batched_tokens=7)),
            "max_num_batched_tokens: worker w1 has 7, needs at least 8",
        ),
    ],
)
async def test_a_mismatching_worker_is_refused_with_both_values(
    start: Start, hello: worker_pb2.WorkerHello, text: str
) -> None:
    bench = await start()
    await bench.worker(id="w0")
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await bench.worker(id="w1", hello=hello)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_reattaching_worker_with_another_configuration_is_refused_with_both_values(start: Start) -> None:
    bench = await start()
    first = await bench.worker(id="w0")
    await first.leave()
    other = worker_pb2.WorkerHello(model=model_pb2.ModelIdentity(fingerprint="11"))
    with pytest.raises(grpc.aio.AioRpcError, match="worker w0, when it connected first, has '00', worker w0 has '11'"):
        await bench.worker(id="w0", hello=other)


ONES, TWOS = (
    worker_pb2.WorkerHello(weights_state=worker_pb2.WeightsState(weights_digest=bytes([digit]) * 32))
    for digit in (0x11, 0x22)
)
WEIGHTS_CHANGED = "weights: worker w1 has 222222222222, worker w0 has 111111111111, under the same config.json"


async def test_other_weights_are_refused_while_the_first_are_in_use(start: Start) -> None:
    bench = await start()
    first = await bench.worker(id="w0", hello=ONES)
    with pytest.raises(grpc.aio.AioRpcError, match=WEIGHTS_CHANGED) as refused:
        await bench.worker(id="w1", hello=TWOS)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for worker in (await bench.worker(id="w2", hello=ONES), first):
        await worker.leave()
        await worker.task  # type: ignore[attr-defined]
    await bench.worker(id="w1", hello=TWOS)


async def lost_amid_tokens(bench: SchedulerHarness) -> FrontendPeer:
    """Loses the only worker, whose weights are ONES, in the middle of sequence 0."""
    worker = await bench.worker(id="w0", hello=ONES)
    frontend = await bench.frontend()
    worker.stand_still_after(4)
    await frontend.submit(0, PROMPTS[0], max_tokens=30, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    worker.call.cancel()
    worker.go_on()
    with suppress(Unavailable, grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        await worker.task  # type: ignore[attr-defined]
    return frontend


async def test_sequences_do_not_mix_tokens_of_different_weights(start: Start) -> None:
    """The sequence with tokens ends; one without tokens continues with the other weights."""
    bench = await start()
    frontend = await lost_amid_tokens(bench)
    await frontend.submit(1, PROMPTS[1], max_tokens=30, eos_token_ids=b"")
    await bench.worker(id="w0", hello=TWOS)
    await frontend.ended(0, 1)
    assert frontend.finished[0].reason == finish_pb2.FINISH_REASON_ERROR
    assert "no worker has the weights any more" in frontend.finished[0].error.message
    assert frontend.tokens[1] == oracle(PROMPTS[1], len(PROMPTS[1]) + 30, eos=False)


async def test_a_worker_with_equal_weights_continues_sequences(start: Start) -> None:
    bench = await start()
    frontend = await lost_amid_tokens(bench)
    await bench.worker(id="w0", hello=ONES)
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 30, eos=False)


async def test_initial_weights_do_not_matter_when_an_update_is_due(start: Start) -> None:
    bench = await start()
    updated = model_pb2.WeightsIdentity(update=7, version="7", path="new")
    await bench.worker(id="w0", hello=ONES, has_weights=updated)
    await bench.worker(id="w1", hello=TWOS)
    assert {"w0", "w1"} <= (await bench.status()).keys()


async def test_an_adapter_of_another_content_is_another_adapter(start: Start) -> None:
    bench = await start()
    await bench.worker(
        id="w0", hello=worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=b"x" * 64))
    )
    other = worker_pb2.WorkerHello(lora=worker_pb2.LoraAdapters(names=["a", "b"], digests=b"x" * 32 + b"y" * 32))
    with pytest.raises(grpc.aio.AioRpcError, match="adapters: 'b' has another content: the cluster has 78"):
        await bench.worker(id="w1", hello=other)


async def test_a_submission_that_cannot_run_ends_with_a_reason(start: Start) -> None:
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    await frontend.submit(0, [1] * 300)
    await frontend.submit(1, [1, 2], root_hash=b"short")
    await frontend.ended(0, 1)
    assert "maximum model length of 200" in frontend.finished[0].error.message
    assert "root_hash" in frontend.finished[1].error.message


async def test_submissions_beyond_max_waiting_are_refused_with_a_retry_hint(start: Start) -> None:
    bench = await start(max_waiting=2)
    frontend = await bench.frontend()
    for i in range(3):
        await frontend.submit(i, PROMPTS[i])
    await frontend.ended(2)
    assert frontend.finished[2].error.code == finish_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert frontend.finished[2].error.retry_after_ms > 0
    assert set(frontend.finished) == {2}


async def test_samples_of_one_submission_share_its_prompt(start: Start) -> None:
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], num_sequences=3)
    await frontend.ended(0, 1, 2)
    assert [frontend.cached[i] for i in range(3)] == [0, 8, 8], "the last token is computed again"
    assert frontend.tokens[0] == frontend.tokens[1] == frontend.tokens[2]


async def test_the_cache_is_reset_between_steps(start: Start) -> None:
    bench = await start()
    worker = await bench.worker()
    worker.stand_still_after(5)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=60, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    async with calling(admin_of("scheduler", bench.address)) as admin:
        with pytest.raises(grpc.aio.AioRpcError, match="sequences run on w0"):
            await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        begun = asyncio.Event()
        reset = asyncio.ensure_future(admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(preempt_running=True)))
        with calls_of(Replica.pause, on_return=lambda _: begun.set()):
            await begun.wait()
        worker.go_on()
        answer = await reset
    assert answer.num_blocks > 0
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPTS[0], len(PROMPTS[0]) + 60, eos=False)
    assert worker.num_resets == 1


async def test_a_draining_scheduler_finishes_and_refuses_submissions(start: Start) -> None:
    bench = await start(drain_timeout_s=60)
    worker = await bench.worker()
    worker.stand_still_after(5)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=40, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    bench.shutdown.request()  # type: ignore[attr-defined]
    await frontend.until(lambda: frontend.view.draining)
    await frontend.submit(1, PROMPTS[1])
    await frontend.ended(1)
    worker.go_on()
    await frontend.ended(0)
    assert len(frontend.tokens[0]) == 40
    assert frontend.finished[1].error.code == finish_pb2.ERROR_CODE_UNAVAILABLE
    await bench.served  # type: ignore[attr-defined]


async def test_health_fails_while_steps_do_not_advance(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "STALLED_AFTER_S", 0.2)
    bench = await start()
    hold = asyncio.Event()
    await bench.worker(hold=hold)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0])
    async with grpc.aio.insecure_channel(bench.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def becomes(status: int) -> None:
            await eventually(
                lambda: health.Check(health_pb2.HealthCheckRequest()), lambda found: found.status == status
            )

        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await bench.status())["w0"].state == admin_pb2.STATE_STALLED
        answer = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, "the process itself is well"
        hold.set()
        await frontend.ended(0)
        await becomes(health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.slow
async def test_a_sequence_that_kills_workers_ends_alone(start: Start) -> None:
    """A worker that runs a prompt starting with 13 loses its connection."""
    bench = await start()
    frontend = await bench.frontend()
    poison, good = [13, 1, 2], PROMPTS[0]
    await frontend.submit(0, poison, max_tokens=30, eos_token_ids=b"")
    await frontend.submit(1, good, max_tokens=30, eos_token_ids=b"")
    losses = 0
    while 0 not in frontend.finished:
        worker = await bench.worker(poison=13, step_s=0.005)
        ended = asyncio.ensure_future(frontend.ended(0))
        await asyncio.wait([worker.task, ended], timeout=60, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[attr-defined]
        ended.cancel()
        losses += 1
        assert losses < 8
    assert frontend.finished[0].error.code == finish_pb2.ERROR_CODE_INTERNAL
    assert "lost while they ran this request" in frontend.finished[0].error.message
    await frontend.ended(1)
    assert frontend.tokens[1] == oracle(good, len(good) + 30, eos=False)


@pytest.mark.parametrize("hears_welcome", [True, False])
async def test_a_lost_connection_counts_as_no_worker_loss(start: Start, hears_welcome: bool) -> None:
    """The connection is lost with the first step again and again, and the same process reattaches. If the welcome was
    lost, the process knows an earlier epoch."""
    bench = await start()
    frontend = await bench.frontend()
    fragile = [13, 1, 2]
    await frontend.submit(0, fragile, max_tokens=30, eos_token_ids=b"")
    last_epoch = 0
    for _ in range(2 * SchedulerSettings().max_worker_losses):
        hello = worker_pb2.WorkerHello(last_epoch=last_epoch, connection_lost=True)
        worker = await bench.worker(poison=13, hello=hello)
        await asyncio.wait([worker.task])  # type: ignore[attr-defined]
        last_epoch = worker.epoch if hears_welcome or not last_epoch else last_epoch
    await bench.worker(hello=worker_pb2.WorkerHello(last_epoch=last_epoch, connection_lost=True))
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(fragile, len(fragile) + 30, eos=False)


@pytest.mark.parametrize("given_up", [False, True])
async def test_only_a_lost_connection_is_not_counted(start: Start, given_up: bool) -> None:
    """Losses of another process count, and those where the scheduler detached the worker, whatever the worker
    reports."""
    bench = await start(step_deadline_s=0.25)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=30, eos_token_ids=b"")
    last_epoch = 0
    for _ in range(SchedulerSettings().max_worker_losses):
        hello = worker_pb2.WorkerHello(last_epoch=last_epoch, connection_lost=True)
        hung = {"hold": asyncio.Event(), "reads_on": True} if given_up else {"poison": PROMPTS[0][0]}
        worker = await bench.worker(hello=hello, **hung)
        await asyncio.wait([worker.task])  # type: ignore[attr-defined]
        last_epoch = worker.epoch if given_up else 0
    await frontend.ended(0)
    assert "lost while they ran this request" in frontend.finished[0].error.message


async def test_health_is_per_service_and_the_first_message_must_be_hello(start: Start) -> None:
    bench = await start()
    async with grpc.aio.insecure_channel(bench.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *main.SERVICES):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        session = channel.stream_stream(
            "/quire.scheduler.v1.SchedulerService/Session",
            scheduler_pb2.SessionRequest.SerializeToString,
            scheduler_pb2.SessionResponse.FromString,
        )()
        await session.write(scheduler_pb2.SessionRequest(heartbeat=scheduler_pb2.Heartbeat()))
        with pytest.raises(grpc.aio.AioRpcError, match="must be hello"):
            await session.read()
