"""Commands of the device thread, and what is in progress on the device."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.services.worker.kv.host_memory import PendingCopy
from quire.services.worker.kv_transfer.page_orders import PageOrder
from quire.services.worker.lora.peft.peft_folder import PeftFolder
from quire.services.worker.media.waiting import FetchedOrder, WaitingMedia
from quire.services.worker.replica.flight import StepInFlight
from quire.services.worker.replica.media_encoding import EncodedBatch
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.result import StepResult
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.step_value import step_value


class ResultReceiver(Protocol):
    """Receives the results of an attachment on the event loop."""

    def deliver(self, result: StepResult) -> None: ...

    def abort_session(self, reason: str) -> None:
        """Ends the attachment: no further result will follow."""

    def grammar_prepared(self, prepared: pb.GrammarPrepared) -> None: ...

    def media_prepared(self, prepared: pb.MediaPrepared) -> None: ...

    def blocks_transferred(self, done: pb.Transferred) -> None: ...

    def blocks_fetched(self, done: pb.BlocksFetched) -> None: ...

    def adapter_loaded(self, loaded: pb.AdapterLoaded) -> None: ...

    def device_order_done(self, done: pb.DeviceOrderDone) -> None: ...


@step_value
class Execute:
    """Executes a plan; skipped if its receiver is no longer the current one. `arrived_ns` by time.perf_counter_ns()."""

    receiver: ResultReceiver
    plan: StepPlan
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Ends the epoch once no step is in flight."""

    reply: asyncio.Future[RetainedState]


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Discards the record of which tokens the blocks hold."""


@dataclass(frozen=True, slots=True)
class ReleaseGrammar:
    """Releases a grammar after the plans before it, which may use it."""

    grammar_id: bytes


@dataclass(frozen=True, slots=True)
class EncodeMedia:
    """Encodes some of the fetched media items that wait, after the commands before it."""

    waiting: WaitingMedia


@dataclass(frozen=True, slots=True)
class ReleaseMedia:
    """Releases the rows of a media item after the plans before it, which may use them."""

    identifier: bytes


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Reads the rows of a media item into host memory."""

    receiver: ResultReceiver
    identifier: bytes
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class PendingMedia:
    """Media items that the device is encoding."""

    orders: Sequence[FetchedOrder]
    batch: EncodedBatch


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Starts a transfer between device and host memory after the plans before it."""

    receiver: ResultReceiver
    order: pb.Transfer


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A block transfer in progress; `begun_ns` by time.perf_counter_ns()."""

    receiver: ResultReceiver
    transfer_id: int
    pending: PendingCopy
    begun_ns: int


@step_value
class LaunchedStep:
    """A launched step with what its result needs; `wait_us` is the time that its plan was queued."""

    receiver: ResultReceiver
    flight: StepInFlight
    wait_us: int
    ticket: int  # of RankGroup.broadcast


@step_value
class FinishedStep:
    """A step that the device has finished; `output` is None if it failed."""

    launched: LaunchedStep
    output: RunnerOutput | None


@dataclass(frozen=True, slots=True)
class StagesFinished:
    """Reports that the other pipeline stages' output of a step has arrived."""

    launched: LaunchedStep


@dataclass(frozen=True, slots=True)
class ShareGrammar:
    """Makes the other ranks compile a grammar."""

    order: pb.PrepareGrammar


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Adds an adapter that has been read from disk."""

    receiver: ResultReceiver
    order_id: int
    folder: PeftFolder
    digest: bytes


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """Removes an adapter after the plans before it, which may use it."""

    adapter: AdapterId


@dataclass(frozen=True, slots=True)
class ExecuteDeviceOrder:
    """Executes a device order after the plans before it, when no step is in flight."""

    receiver: ResultReceiver
    order: pb.DeviceOrder


Deferred = Execute | ReleaseGrammar | EncodeMedia | ReleaseMedia | MoveBlocks | RemoveAdapter | ExecuteDeviceOrder
Command = (
    Deferred | PageOrder | ReadRows | EndEpoch | ResetCache | ShareGrammar | AddAdapter | FinishedStep | StagesFinished
)
