"""The engine's threads with a fake replica: order, overlap, ends of sessions, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from quire.services.worker.engine.engine import MAX_STALLED_CHECKS, Engine
from quire.services.worker.ranks.group import OneRank, RankFailure, RankGroup
from quire.services.worker.replica.mixture_experts import MixtureExperts
from quire.services.worker.replica.replica import Occupancy
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.runner.step_cost import NO_COST_MODEL
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.metrics.worker import StepCost
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.waiting import eventually, loop_turns

PATIENCE_S = 60.0
REPORT = RetainedState([3], b"h" * 32)


class DeviceLost(RuntimeError):
    """Error of a lost device; torch's message contains "CUDA error"."""


@dataclass
class PaperFlight:
    """A fake step that finishes when the test allows it."""

    step_id: int
    landed: threading.Event
    error: BaseException | None
    result_error: Exception | None = None
    heads_launched: bool = True

    @property
    def launch(self) -> PaperFlight:
        return self

    @property
    def inputs(self) -> PaperFlight:
        return self

    @property
    def num_tokens(self) -> int:
        return 1

    def wait(self) -> str:
        assert self.landed.wait(PATIENCE_S)
        if self.error:
            raise self.error
        return f"outcome {self.step_id}"

    def result(self, outcome: str, wait_us: int) -> pb.StepResult:
        assert outcome == f"outcome {self.step_id}"
        assert wait_us >= 0
        if self.result_error:
            raise self.result_error
        return pb.StepResult(step_id=self.step_id)


@dataclass
class PaperMove:
    """A fake copy that finishes when the test allows it."""

    done: threading.Event

    def wait(self) -> None:
        assert self.done.wait(PATIENCE_S)


@dataclass
class PaperReplica:
    """A fake replica that records calls and their threads."""

    log: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    landings: dict[int, threading.Event] = field(default_factory=dict)
    launch_errors: dict[int, BaseException] = field(default_factory=dict)
    landing_errors: dict[int, BaseException] = field(default_factory=dict)
    result_errors: dict[int, Exception] = field(default_factory=dict)
    move_errors: dict[int, Exception] = field(default_factory=dict)
    move_done: threading.Event = field(default_factory=threading.Event)
    hold: bool = False  # steps land only when told
    waiting: set[int] = field(default_factory=set)  # steps that begin only when nothing is under way

    def _note(self, what: str) -> None:
        self.log.append(what)
        self.threads.add(threading.current_thread().name)

    cost_model = NO_COST_MODEL

    @property
    def speculation(self) -> PaperReplica:
        return self

    @property
    def transfers(self) -> PaperReplica:
        return self

    @property
    def experts(self) -> MixtureExperts:
        return MixtureExperts()

    def waits_before(self, plan: pb.StepPlan) -> bool:
        return plan.step_id in self.waiting

    def launch(self, plan: pb.StepPlan) -> PaperFlight:
        self._note(f"launch {plan.step_id}")
        if plan.step_id in self.launch_errors:
            raise self.launch_errors[plan.step_id]
        landing = self.landings.setdefault(plan.step_id, threading.Event())
        if not self.hold:
            landing.set()
        return PaperFlight(
            plan.step_id, landing, self.landing_errors.get(plan.step_id), self.result_errors.get(plan.step_id)
        )

    def record(self, flight: PaperFlight, outcome: str) -> None:
        self._note(f"record {flight.step_id}")

    def end_epoch(self) -> RetainedState:
        self._note("rest")
        return REPORT

    def move(self, order: pb.Transfer) -> PaperMove:
        self._note(f"move {order.transfer_id}")
        if order.transfer_id in self.move_errors:
            raise self.move_errors[order.transfer_id]
        return PaperMove(self.move_done)

    def reset_cache(self) -> None:
        self._note("forget")

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self.log), 0, 0)


class Inbox:
    """A receiver that stores what it receives."""

    def __init__(self) -> None:
        self.results: asyncio.Queue[int] = asyncio.Queue()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.moves: asyncio.Queue[pb.Transferred] = asyncio.Queue()

        self.orders: asyncio.Queue[int] = asyncio.Queue()

    def blocks_transferred(self, done: pb.Transferred) -> None:
        self.moves.put_nowait(done)

    def device_order_done(self, done: pb.DeviceOrderDone) -> None:
        self.orders.put_nowait(done.order_id)

    def deliver(self, result: pb.StepResult) -> None:
        self.results.put_nowait(result.step_id)

    def abort_session(self, reason: str) -> None:
        self.broken.set_result(reason)

    async def next(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.results.get()


class NoObserver:
    def observe_step(self, result: pb.StepResult, num_tokens: int, _cost: StepCost) -> None:
        """Ignores the step."""

    def grammar_prepared(self, prepared: CompileResult) -> None:
        """Ignores the grammar."""


class NoLibrary:
    """A grammar backend that refuses every grammar and names the calling thread."""

    num_words = 1

    def compile(self, constraint: sampling_pb2.StructuredOutput) -> None:
        raise InvalidArgument(f"no {constraint.regex} in {threading.current_thread().name}")


def no_grammars() -> CompilePool:
    return CompilePool(NoLibrary)  # type: ignore[arg-type]


Start = Callable[..., Engine]


@pytest.fixture
def replica() -> PaperReplica:
    return PaperReplica()


@pytest.fixture
async def start(replica: PaperReplica) -> AsyncIterator[Start]:
    engines: list[Engine] = []

    def run(*, synchronous: bool = True, ranks: RankGroup | None = None) -> Engine:
        grammars = no_grammars()
        engine = Engine(lambda: replica, NoObserver(), grammars=grammars, synchronous=synchronous, ranks=ranks)  # type: ignore[arg-type, return-value]
        engines.append(engine)
        return engines[-1]

    yield run
    for landing in replica.landings.values():
        landing.set()
    for engine in engines:
        assert await engine.stop(PATIENCE_S)


def submit(engine: Engine, receiver: Inbox, *step_ids: int) -> None:
    for step_id in step_ids:
        engine.submit(receiver, pb.StepPlan(step_id=step_id))


@pytest.mark.parametrize("synchronous", [True, False])
async def test_results_are_in_order_and_the_device_has_one_thread(
    start: Start, replica: PaperReplica, synchronous: bool
) -> None:
    engine, inbox = start(synchronous=synchronous), Inbox()
    assert await engine.start_epoch(inbox) == REPORT
    submit(engine, inbox, 1, 2, 3)
    assert [await inbox.next() for _ in range(3)] == [1, 2, 3]
    await eventually(lambda: "record 3" in replica.log)
    assert replica.threads == {"device"}
    assert engine.last_step_s is not None


async def test_the_next_step_is_launched_before_the_last_one_has_landed(start: Start, replica: PaperReplica) -> None:
    replica.hold = True
    engine, inbox = start(synchronous=False), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1, 2)
    await eventually(lambda: "launch 2" in replica.log)
    assert replica.log == ["rest", "launch 1", "launch 2"]
    assert engine.oldest_pending_s > 0
    replica.landings[1].set()
    assert await inbox.next() == 1
    submit(engine, inbox, 3)
    await eventually(lambda: "launch 3" in replica.log)
    replica.landings[2].set()
    replica.landings[3].set()
    assert [await inbox.next(), await inbox.next()] == [2, 3]
    assert engine.oldest_pending_s == 0


async def test_a_step_that_needs_to_know_the_one_before_waits_until_it_is_recorded(
    start: Start, replica: PaperReplica
) -> None:
    replica.hold, replica.waiting = True, {2}
    engine, inbox = start(synchronous=False), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1, 2, 3)
    await eventually(lambda: "launch 1" in replica.log)
    replica.landings[1].set()
    await eventually(lambda: "launch 3" in replica.log)
    assert replica.log == ["rest", "launch 1", "record 1", "launch 2", "launch 3"]


async def test_a_new_attachment_waits_for_steps_under_way_and_skips_the_rest(
    start: Start, replica: PaperReplica
) -> None:
    replica.hold = True
    engine, old, new = start(synchronous=False), Inbox(), Inbox()
    await engine.start_epoch(old)
    submit(engine, old, 1)
    await eventually(lambda: "launch 1" in replica.log)
    resting = asyncio.ensure_future(engine.start_epoch(new))
    await loop_turns()
    submit(engine, old, 2)
    replica.landings[1].set()
    async with asyncio.timeout(PATIENCE_S):
        await resting
    replica.hold = False
    submit(engine, new, 1)
    assert await new.next() == 1
    assert old.results.empty()
    await eventually(lambda: replica.log.count("record 1") == 2)
    assert replica.log == ["rest", "launch 1", "record 1", "rest", "launch 1", "record 1"]


async def test_violation_ends_the_session_and_skips_later_plans(start: Start, replica: PaperReplica) -> None:
    replica.launch_errors[2] = PlanViolation("slot 3 is live already")
    engine, inbox = start(), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1, 2, 3)
    async with asyncio.timeout(PATIENCE_S):
        assert await inbox.broken == "step 2 breaks the session: slot 3 is live already"
    await engine.start_epoch(Inbox())
    assert replica.log == ["rest", "launch 1", "record 1", "launch 2", "rest"]


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("where", ["launch_errors", "landing_errors", "result_errors"])
async def test_a_failing_step_ends_the_session_not_the_engine(
    start: Start, replica: PaperReplica, where: str, synchronous: bool
) -> None:
    getattr(replica, where)[1] = ValueError("some bug")
    engine, inbox, after = start(synchronous=synchronous), Inbox(), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1)
    async with asyncio.timeout(PATIENCE_S):
        assert await inbox.broken == "step 1 failed: ValueError: some bug"
    await engine.start_epoch(after)
    submit(engine, after, 2)
    assert await after.next() == 2
    assert not engine.died.done()


async def test_transfers_run_after_earlier_plans_and_do_not_block_later_ones(
    start: Start, replica: PaperReplica
) -> None:
    replica.hold, replica.waiting = True, {2}
    engine, inbox = start(synchronous=False), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1, 2)
    engine.transfer(inbox, pb.Transfer(transfer_id=7))
    await eventually(lambda: "launch 1" in replica.log)
    replica.landings[1].set()
    await eventually(lambda: "move 7" in replica.log)
    assert replica.log.index("launch 2") < replica.log.index("move 7")
    submit(engine, inbox, 3)
    await eventually(lambda: "launch 3" in replica.log)
    assert inbox.moves.empty()
    replica.move_done.set()
    async with asyncio.timeout(PATIENCE_S):
        assert (await inbox.moves.get()).transfer_id == 7


@pytest.mark.parametrize("synchronous", [True, False])
async def test_failed_transfers_do_not_end_the_session(start: Start, replica: PaperReplica, synchronous: bool) -> None:
    replica.move_errors[1] = MemoryError("no room to stage them")
    engine, inbox = start(synchronous=synchronous), Inbox()
    await engine.start_epoch(inbox)
    engine.transfer(inbox, pb.Transfer(transfer_id=1))
    async with asyncio.timeout(PATIENCE_S):
        told = await inbox.moves.get()
    assert (told.transfer_id, told.error.message) == (1, "MemoryError: no room to stage them")
    submit(engine, inbox, 1)
    assert await inbox.next() == 1


async def test_a_transfer_that_breaks_the_rules_ends_the_session(start: Start, replica: PaperReplica) -> None:
    replica.move_errors[1] = PlanViolation("there is no place 9")
    engine, inbox = start(), Inbox()
    await engine.start_epoch(inbox)
    engine.transfer(inbox, pb.Transfer(transfer_id=1))
    async with asyncio.timeout(PATIENCE_S):
        assert await inbox.broken == "transfer 1 breaks the session: there is no place 9"


async def test_a_transfer_of_an_attachment_that_is_over_is_skipped(start: Start, replica: PaperReplica) -> None:
    engine, old, new = start(), Inbox(), Inbox()
    await engine.start_epoch(old)
    await engine.start_epoch(new)
    engine.transfer(old, pb.Transfer(transfer_id=1))
    submit(engine, new, 1)
    assert await new.next() == 1
    assert "move 1" not in replica.log


class StagingOrders:
    """Orders that stage weights during steps until the test lets them finish."""

    stages_beside_steps = True

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.begun, self.done = threading.Event(), threading.Event()

    def interrupt(self, order: pb.DeviceOrder) -> None:
        self._note(f"heard of {order.WhichOneof('order')}")

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        assert order.HasField("stage_weights")
        self.begun.set()
        assert self.done.wait(PATIENCE_S)
        self._note("stage")
        return False

    def drop_weights(self) -> None:
        self._note("drop")


class StagingReplica(PaperReplica):
    """A fake replica with orders that run during steps."""

    def __init__(self) -> None:
        super().__init__()
        self.orders = StagingOrders(self._note)

    def execute_order(self, order: pb.DeviceOrder) -> None:
        self._note("drop")


async def test_abandoned_weights_are_dropped_after_staging() -> None:
    """Dropping them earlier would leave the staged copy in memory."""
    replica, inbox = StagingReplica(), Inbox()
    engine = Engine(lambda: replica, NoObserver(), grammars=no_grammars(), synchronous=True)  # type: ignore[arg-type, return-value]
    await engine.start_epoch(inbox)
    engine.device_order(inbox, pb.DeviceOrder(order_id=1, stage_weights=pb.StageWeights()))
    await asyncio.to_thread(replica.orders.begun.wait, PATIENCE_S)
    engine.device_order(inbox, pb.DeviceOrder(order_id=2, drop_weights=pb.DropWeights()))
    submit(engine, inbox, 1)
    await inbox.next()  # the device's thread is done with all that came before
    replica.orders.done.set()
    async with asyncio.timeout(PATIENCE_S):
        assert sorted([await inbox.orders.get() for _ in range(2)]) == [1, 2]
    assert [said for said in replica.log if said in ("stage", "drop")] == ["stage", "drop"]
    assert await engine.stop(PATIENCE_S)


async def test_order_is_answered_for_any_error_of_the_weights_library() -> None:
    replica, inbox = StagingReplica(), Inbox()

    def panic(_order: pb.DeviceOrder) -> bool:
        raise Panic("index out of bounds")

    replica.orders.execute_order = panic  # type: ignore[method-assign]
    engine = Engine(lambda: replica, NoObserver(), grammars=no_grammars(), synchronous=True)  # type: ignore[arg-type, return-value]
    await engine.start_epoch(inbox)
    engine.device_order(inbox, pb.DeviceOrder(order_id=1, stage_weights=pb.StageWeights()))
    async with asyncio.timeout(PATIENCE_S):
        assert await inbox.orders.get() == 1
    assert await engine.stop(PATIENCE_S)


async def test_a_broken_device_is_the_end(start: Start, replica: PaperReplica) -> None:
    replica.launch_errors[1] = DeviceLost("CUDA error: an illegal memory access was encountered")
    engine, inbox = start(), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1)
    with pytest.raises(Internal, match="illegal memory access"):
        async with asyncio.timeout(PATIENCE_S):
            await engine.died
    assert inbox.broken.done()


class Panic(BaseException):
    """A BaseException that is no Exception, as libraries in Rust raise."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit("a plugin's exit")])
@pytest.mark.parametrize("synchronous", [True, False])
async def test_every_ended_thread_is_reported(
    start: Start, replica: PaperReplica, error: BaseException, synchronous: bool
) -> None:
    """The next attachment would wait for the thread forever."""
    (replica.launch_errors if synchronous else replica.landing_errors)[1] = error
    engine, inbox = start(synchronous=synchronous), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1)
    with pytest.raises(Internal, match=f"{type(error).__name__}: {error}"):
        async with asyncio.timeout(PATIENCE_S):
            await engine.died


async def test_neither_does_the_one_that_builds() -> None:
    def build() -> None:
        raise Panic("index out of bounds")

    engine = Engine(build, NoObserver(), grammars=no_grammars(), synchronous=True)  # type: ignore[arg-type]
    with pytest.raises(Internal, match="Panic: index out of bounds"):
        async with asyncio.timeout(PATIENCE_S):
            await engine.started
    assert await engine.stop(PATIENCE_S)


async def test_a_reset_reaches_the_record(start: Start, replica: PaperReplica) -> None:
    engine = start()
    engine.reset_cache()
    await engine.start_epoch(Inbox())
    assert replica.log == ["forget", "rest"]


async def test_occupancy_is_published_when_the_engine_is_idle(start: Start, replica: PaperReplica) -> None:
    engine, inbox = start(), Inbox()
    await engine.start_epoch(inbox)
    submit(engine, inbox, 1)
    await inbox.next()
    await eventually(lambda: engine.occupancy.num_live == 3)
    assert engine.occupancy.num_live == 3


async def test_build_errors_are_reported() -> None:
    def build() -> None:
        raise InvalidArgument("no such model")

    engine = Engine(build, NoObserver(), grammars=no_grammars(), synchronous=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no such model"):
        async with asyncio.timeout(PATIENCE_S):
            await engine.started
    assert await engine.stop(PATIENCE_S)


class PaperRanks(OneRank):
    """A group of two ranks, one of which has ended."""

    size = 2

    def __init__(self) -> None:
        self.stopped_after_s: list[float] = []

    def stop(self, timeout_s: float) -> None:
        self.stopped_after_s.append(timeout_s)


async def test_ranks_that_are_stuck_in_a_step_are_killed_and_end_the_engine(
    start: Start, replica: PaperReplica
) -> None:
    replica.hold, ranks = True, PaperRanks()
    engine, inbox = start(synchronous=False, ranks=ranks), Inbox()
    await engine.start_epoch(inbox)
    for _ in range(2 * MAX_STALLED_CHECKS):  # no work: no rank is stuck
        engine.check_ranks()
    submit(engine, inbox, 1)
    await eventually(lambda: "launch 1" in replica.log)
    for _ in range(2 * MAX_STALLED_CHECKS):
        engine.check_ranks()
    with pytest.raises(RankFailure, match="stuck in a step"):
        await engine.died
    assert ranks.stopped_after_s[0] == 0.0
