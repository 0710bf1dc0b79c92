"""Simulated execution of plans in real time, on the event loop and without torch."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import numpy.typing as npt

from quire.services.worker.attach.attachment import Attachment
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.simulated.timing import Timing
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.slots import SlotTable, Step
from quire.services.worker.step.step_inputs import StepInputs, assemble
from quire.shared.errors import QuireError, Unimplemented, to_proto
from quire.shared.pb.worker.v1 import worker_pb2 as pb

Plans = asyncio.Queue[tuple[Attachment, StepPlan]]
U64 = npt.NDArray[np.uint64]


class SimulatedEngine:
    """Executor without a device: executes steps one after the other for the time that `timing` returns. A token is a
    function of (seed, position)."""

    def __init__(self, limits: WorkerLimits, vocab_size: int, timing: Timing) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._timing = timing
        self._plans: Plans = asyncio.Queue()
        self._receiver: Attachment | None = None
        self._table = SlotTable(limits)
        self._seeds = np.zeros(limits.max_num_seqs, dtype=np.uint64)
        self._free_at = 0.0  # time.monotonic() at which the simulated device becomes idle

    async def start_epoch(self, receiver: Attachment) -> RetainedState:
        """Starts an epoch for `receiver`; a simulation retains no KV."""
        self._receiver = receiver
        self._plans = asyncio.Queue()
        self._table.clear()
        return RetainedState([], b"")

    def submit(self, receiver: Attachment, plan: StepPlan) -> None:
        self._plans.put_nowait((receiver, plan))

    def reset_cache(self) -> None:
        pass

    def prepare_grammar(self, receiver: Attachment, order: pb.PrepareGrammar) -> None:
        """Reports success at once: invented tokens follow no grammar."""
        receiver.grammar_prepared(pb.GrammarPrepared(grammar_id=order.grammar_id))

    def release_grammar(self, grammar_id: bytes) -> None:
        pass

    def prepare_media(self, receiver: Attachment, order: pb.PrepareMedia) -> None:
        """Reports success at once: invented tokens depend on no picture."""
        receiver.media_prepared(pb.MediaPrepared(identifier=order.item.identifier))

    def release_media(self, identifier: bytes) -> None:
        pass

    def transfer(self, receiver: Attachment, order: pb.Transfer) -> None:
        """Ends the session: a simulated worker announces no host memory."""
        receiver.abort_session("a simulated worker has no host memory for blocks")

    def disk_transfer(self, receiver: Attachment, order: pb.DiskTransfer) -> None:
        """Ends the session: a simulated worker announces no disk."""
        receiver.abort_session("a simulated worker has no disk for blocks")

    def fetch_blocks(self, receiver: Attachment, order: pb.FetchBlocks) -> None:
        """Ends the session: a simulated worker announces that it fetches no blocks."""
        receiver.abort_session("a simulated worker does not fetch blocks")

    def load_adapter(self, receiver: Attachment, order: pb.LoadAdapter) -> None:
        """Reports an Unimplemented error: there are no weights to adapt."""
        error = to_proto(Unimplemented("a simulated worker has no weights to adapt"))
        receiver.adapter_loaded(pb.AdapterLoaded(order_id=order.order_id, error=error))

    def unload_adapter(self, order: pb.UnloadAdapter) -> None:
        pass

    def device_order(self, receiver: Attachment, order: pb.DeviceOrder) -> None:
        """Reports an Unimplemented error: there are neither weights nor device memory."""
        error = to_proto(Unimplemented("a simulated worker has neither weights nor memory of a device"))
        receiver.device_order_done(pb.DeviceOrderDone(order_id=order.order_id, error=error))

    async def run(self) -> None:
        """Executes plans one after the other until cancelled; plans of an ended attachment are dropped."""
        while True:
            plans = self._plans
            try:
                async with asyncio.timeout(0.1):  # start_epoch() may have replaced the queue
                    receiver, plan = await plans.get()
            except TimeoutError:
                continue
            if receiver is self._receiver:
                await self._execute(receiver, plan)

    async def _execute(self, receiver: Attachment, plan: StepPlan) -> None:
        """Applies a plan to the slot table, sleeps for the step and delivers invented tokens; a step that completes a
        pooling request fails it. A PlanViolation ends the session."""
        try:
            step = self._table.apply_plan(plan)
        except PlanViolation as violation:
            receiver.abort_session(f"step {plan.step_id} breaks the session: {violation}")
            return
        for admission in step.admitted:
            self._seeds[admission.slot] = SlotAdmission.of(admission).sampling.seed % 2**64
        inputs = assemble(step, self._table)
        await self._sleep_for_step(step, inputs)
        if receiver is self._receiver:
            failures = [_no_vector(slot) for slot in inputs.completed_slots.tolist()]
            tokens = self._tokens(inputs)
            receiver.deliver(StepResult(plan.epoch, plan.step_id, tokens, None, None, failures, wait_us=0))

    async def _sleep_for_step(self, step: Step, inputs: StepInputs) -> None:
        """Sleeps so that steps follow each other without a gap, as on a device, independent of timer granularity."""
        num_decoding = int(np.count_nonzero(step.counts == 1))
        duration = self._timing.seconds(inputs.num_tokens, num_decoding)
        self._free_at = max(self._free_at, time.monotonic()) + duration
        await asyncio.sleep(self._free_at - time.monotonic())

    def _tokens(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        """Returns one token id in [0, vocab_size) per sampling slot, a hash of seed and position."""
        mixed = _mix(self._seeds[inputs.sampling_slots] ^ _mix(inputs.sample_positions.astype(np.uint64)))
        tokens: npt.NDArray[np.int32] = (mixed % np.uint64(self._vocab_size)).astype(np.int32)
        return tokens


def _no_vector(slot: int) -> tuple[int, QuireError]:
    """Returns the failure of a slot that would have a pooled vector."""
    return slot, Unimplemented("a simulated worker has no hidden states to pool")


def _mix(words: U64) -> U64:
    """Mixes the bits of words by the finalizer of splitmix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
