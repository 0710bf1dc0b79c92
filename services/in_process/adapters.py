"""Adapters of an in-process engine, loaded and scheduled by the rules of a cluster."""

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
    """The only worker of the engine, in the form that ClusterAdapters expects."""

    hello: pb.WorkerHello
    adapters: ReplicaAdapters
    core: Core
    leaving: bool = False

    @property
    def id(self) -> str:
        return self.hello.worker_id


class EngineAdapters:
    """Adapters of one engine. All methods are called between two steps, in the engine's thread; orders have been
    executed when a call returns."""

    def __init__(self, device: AdapterManager, reader: AdapterReader, core: Core, model_name: str, owner: int) -> None:
        """`device`: the device's adapters, those loaded at the start included; `owner`: owner id of all sequences."""
        self._device, self._reader, self._core = device, reader, core
        self._model_name = model_name
        loaded = device.loaded()
        hello = pb.WorkerHello(
            worker_id="engine",
            lora=pb.LoraAdapters(
                max_adapters=device.max_adapters,
                names=[adapter.id.name for adapter in loaded],
                digests=b"".join(adapter.id.digest for adapter in loaded),
                paths=[adapter.path for adapter in loaded],
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
        """Digests by name: the adapters that requests may choose."""
        return self._known.offered

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Loads an adapter. Raises QuireError; then nothing has changed."""
        request = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        await self._known.load(request, self._model_name)

    async def unload(self, name: str) -> int:
        """Unloads an adapter once its sequences have ended; returns their number. Raises QuireError."""
        return (await self._known.unload(name)).num_sequences

    def add(self, sequence: Sequence) -> None:
        """Starts a sequence, or keeps it waiting for its adapter; waiting sequences do not delay others."""
        self._live.add(sequence)
        self._start_or_defer(sequence)

    def cancel(self, key: int) -> None:
        """Cancels the sequence with this key, waiting or in the core; without one, does nothing. No step is in
        flight, so its adapter may be unloaded at once."""
        for sequence in [one for one in self._live if one.key == key]:
            self._forget(sequence)
        if key in self._unassigned:
            self._unassigned.remove(key)
        else:
            self._core.cancel(key)

    def on_finished(self, finished: list[SequenceFinished]) -> None:
        """Forgets sequences that have finished in the core."""
        for one in finished:
            self._live.remove(one.sequence.owner, one.sequence.sequence_id)

    def retry_waiting(self) -> list[SequenceFinished]:
        """Starts waiting sequences, in order of arrival, whose adapter is loaded now. Returns the terminal events of
        those whose adapter can no longer be loaded."""
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
        """Adds a sequence to the core if it needs no adapter or its adapter is loaded or can be loaded into a free
        slot now; else keeps it unassigned."""
        adapter, own = sequence.adapter, self._worker.adapters
        if isinstance(adapter, AdapterId) and not own.accepts(adapter):
            self._unassigned.add(sequence)
            self._known.order_load(adapter)  # loads it, if a slot is free
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
        """Executes an order to load or unload an adapter, which a worker would get over the wire, and reports the
        outcome of a load at once."""
        if order.HasField("unload_adapter"):
            self._device.remove(AdapterId(order.unload_adapter.name, order.unload_adapter.digest))
            return
        load = order.load_adapter
        outcome = self._read(load)
        if isinstance(outcome, QuireError):
            loaded = pb.AdapterLoaded(order_id=load.order_id, error=to_proto(outcome))
        else:
            loaded = pb.AdapterLoaded(order_id=load.order_id, digest=outcome)
        self._worker.adapters.receive_loaded(loaded)

    def _read(self, order: pb.LoadAdapter) -> bytes | QuireError:
        """Reads an adapter from its folder and loads it into its slot. Returns its digest, or the error; an
        unexpected exception is logged and returned as Internal."""
        found = self._reader.find(order.name, order.path, order.digest)
        if isinstance(found, QuireError):
            return found
        try:
            self._device.add(*found)
        except QuireError as error:
            return error
        except Exception as error:
            log.exception("cannot load an adapter", adapter=order.name)
            return Internal(f"lora: {order.name}: {type(error).__name__}")
        return found[1]
