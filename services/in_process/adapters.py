"""The adapters of an engine inside of a program, by a scheduler's rules: which there are, and who takes turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.services.scheduler.cluster import adapters as cluster
from quire.services.scheduler.cluster.live_sequences import LiveSequences
from quire.services.scheduler.cluster.unassigned import UnassignedSequences
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import SequenceFinished, finished_events
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.adapters import ReplicaAdapters
from quire.services.worker.lora.adapters import AdapterManager
from quire.services.worker.lora.peft.reader import AdapterReader
from quire.shared.errors import Internal, QuireError, to_proto
from quire.shared.logs import logger
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("in_process.adapters")


@dataclass(eq=False, slots=True)
class InProcessWorker:
    """The one worker that there is."""

    hello: pb.WorkerHello
    adapters: ReplicaAdapters
    core: Core
    leaving: bool = False

    @property
    def id(self) -> str:
        return self.hello.worker_id


class EngineAdapters:
    """Between two steps, in the engine's thread: what is ordered has been done when the call returns."""

    def __init__(self, device: AdapterManager, reader: AdapterReader, core: Core, model_name: str, owner: int) -> None:
        """`device`: with those that are there from the start; `owner`: of all sequences."""
        self._device, self._reader, self._core = device, reader, core
        self._model_name = model_name
        held = device.loaded()
        hello = pb.WorkerHello(
            worker_id="engine",
            lora=pb.LoraAdapters(
                max_adapters=device.max_adapters,
                names=[adapter.id.name for adapter in held],
                digests=b"".join(adapter.id.digest for adapter in held),
                paths=[adapter.path for adapter in held],
            ),
        )
        self._worker = InProcessWorker(hello, ReplicaAdapters(hello, self._execute, lambda _outcome: None), core)
        self._live = LiveSequences()
        self._live.add_owner(owner)
        self._unassigned = UnassignedSequences()
        self._known = cluster.ClusterAdapters(
            {self._worker.id: self._worker},
            num_users=self._live.num_users,
            used_by=lambda _: {one.adapter for one in self._live if one.key not in self._unassigned},
            on_loaded=lambda: None,
        )
        self._known.on_worker_attached(self._worker)

    @property
    def offered(self) -> dict[str, bytes]:
        """Digests by name: what requests may choose."""
        return self._known.offered

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Raises QuireError, and then nothing has changed."""
        request = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        await self._known.load(request, self._model_name)

    async def unload(self, name: str) -> int:
        """Returns how many sequences still go through it, to their ends. Raises QuireError."""
        return (await self._known.unload(name)).num_sequences

    def add(self, sequence: Sequence) -> None:
        """To those that run, or to those that wait for its adapter; these hold up nobody."""
        self._live.add(sequence)
        self._start_or_defer(sequence)

    def cancel(self, key: int) -> None:
        """Nothing of it is under way between two steps: its adapter may go at once."""
        for sequence in [one for one in self._live if one.key == key]:
            self._forget(sequence)
        if key in self._unassigned:
            self._unassigned.remove(key)
        else:
            self._core.cancel(key)

    def on_finished(self, finished: list[SequenceFinished]) -> None:
        """These have, in the core."""
        for one in finished:
            self._live.remove(one.sequence.owner, one.sequence.sequence_id)

    def retry_waiting(self) -> list[SequenceFinished]:
        """Before a step: who waits, in order, goes on if there is room now. Returns those for whom there is none ever:
        their adapter cannot be had any more."""
        self._known.unload_unused()
        self._known.begin_fetch_round()
        lost = []
        for sequence in self._unassigned:
            self._unassigned.remove(sequence.key)
            assert isinstance(sequence.adapter, AdapterId), "others do not wait"
            if self._known.may_be_loaded(sequence.adapter):
                self._start_or_defer(sequence)
                continue
            self._forget(sequence)
            failure = Failure("NOT_FOUND", f"The model `{sequence.adapter.name}` does not exist any more.")
            lost += finished_events(sequence, Reason.ERROR, failure=failure)
        return lost

    def _start_or_defer(self, sequence: Sequence) -> None:
        adapter, own = sequence.adapter, self._worker.adapters
        if isinstance(adapter, AdapterId) and not own.accepts(adapter):
            self._unassigned.add(sequence)
            self._known.fetch(adapter)  # reads it, if a place is free
            if not own.accepts(adapter):
                return
            self._unassigned.remove(sequence.key)
        if isinstance(adapter, AdapterId):
            own.mark_used(adapter)
        self._core.add(sequence)

    def _forget(self, sequence: Sequence) -> None:
        for output in sequence.outputs or (sequence,):
            self._live.remove(output.owner, output.sequence_id)

    @torch.inference_mode()
    def _execute(self, order: pb.AttachResponse) -> None:
        """What a worker would be sent."""
        if order.HasField("unload_adapter"):
            self._device.remove(AdapterId(order.unload_adapter.name, order.unload_adapter.digest))
            return
        asked = order.load_adapter
        outcome = self._read(asked)
        if isinstance(outcome, QuireError):
            loaded = pb.AdapterLoaded(order_id=asked.order_id, error=to_proto(outcome))
        else:
            loaded = pb.AdapterLoaded(order_id=asked.order_id, digest=outcome)
        self._worker.adapters.receive_loaded(loaded)

    def _read(self, asked: pb.LoadAdapter) -> bytes | QuireError:
        """Puts it in its place. Returns its digest, or why that cannot be done."""
        found = self._reader.find(asked.name, asked.path, asked.digest)
        if isinstance(found, QuireError):
            return found
        try:
            self._device.add(*found)
        except QuireError as error:
            return error
        except Exception as error:
            log.exception("an adapter cannot be loaded", adapter=asked.name)
            return Internal(f"lora: {asked.name}: {type(error).__name__}")
        return found[1]
