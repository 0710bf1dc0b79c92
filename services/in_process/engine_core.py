"""Engine core: a scheduler's core and a worker's replica, connected by plain values."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable

import torch

from quire.services.in_process.adapters import EngineAdapters
from quire.services.in_process.steps import failure_of, fetched_item, plan_for_worker, result_for_core
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Events
from quire.services.scheduler.core.sequences.ending import Failure
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.frontends.submissions import complete_block_hashes
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.services.scheduler.values.payload import Payload
from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.lora.adapters import AdapterManager
from quire.services.worker.lora.open_adapters import adapter_reader
from quire.services.worker.models.loading.weights import NewWeights
from quire.services.worker.replica.replica import Replica
from quire.services.worker.step.fetched_item import Pixels
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared.errors import InvalidArgument, NotFound, QuireError
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.settings import SchedulerSettings, WorkerSettings


def _no_pixels(identifier: bytes) -> Pixels:
    """Raises NotFound: the engine keeps no media."""
    raise NotFound(f"the media item {identifier.hex()} is not kept")


class EngineCore:
    """Plans, computes and applies one step at a time. For use by one thread."""

    def __init__(
        self,
        worker: WorkerSettings,
        scheduler: SchedulerSettings,
        model_name: str,
        owner: int,
        fetch_pixels: Callable[[bytes], Pixels] = _no_pixels,
    ) -> None:
        """Loads the model. `model_name`: name that no adapter may have; `owner`: owner id of all sequences;
        `fetch_pixels`: returns the pixels of a media item, by identifier; raises QuireError. Raises QuireError if the
        settings or the checkpoint are invalid."""
        _check_supported(worker)
        self._fetch_pixels = fetch_pixels
        self._grammars = CompilePool(lambda: open_grammars(worker))
        with torch.inference_mode():
            self.replica = build_replica(worker, self._grammars)
        self.replica.end_epoch()
        self.weight_version = self.replica.orders.version
        self.core = Core(_limits(self.replica, scheduler))
        self.adapters = None
        if isinstance(self.replica.adapters, AdapterManager):
            reader = adapter_reader(worker)
            self.adapters = EngineAdapters(self.replica.adapters, reader, self.core, model_name, owner)
        self._prepared: queue.SimpleQueue[tuple[bytes, CompileResult]] = queue.SimpleQueue()

    def add(self, sequence: Sequence) -> None:
        """Computes the sequence's block hashes and queues it; a sequence whose adapter is not loaded waits for it
        outside of the core."""
        complete_block_hashes(sequence, self.core.limits.block_size)
        if self.adapters is None:
            self.core.add(sequence)
        else:
            self.adapters.add(sequence)

    def step(self) -> Events:
        """Computes one step and returns its events; none if no sequence can run. Blocks the thread for grammars if
        there is nothing else to do, and starts sequences whose adapter has been loaded."""
        if self.adapters is None:
            return self._step()
        failed = self.adapters.retry_waiting()
        events = self._step()
        self.adapters.on_finished(events.finished)
        events.finished.extend(failed)
        return events

    def _step(self) -> Events:
        """Orders grammars, encodes media, plans a step, runs it on the device and applies its result; returns the
        core's events. If only sequences that wait for grammars exist, blocks until one is compiled."""
        self._order_grammars()
        self._encode_media()
        plan = self.core.schedule(time.monotonic())
        if plan is None and self.core.grammars.num_blocked:
            self._take_prepared(self._prepared.get())
            plan = self.core.schedule(time.monotonic())
        if plan is not None:
            with torch.inference_mode():
                flight = self.replica.launch(plan_for_worker(plan))
                output = flight.launch.wait()
                self.replica.record(flight, output)
            self.core.apply(result_for_core(flight.result(output, wait_us=0)), time.monotonic())
        return self.core.take_events()

    def _encode_media(self) -> None:
        """Executes the core's orders to encode media items and to release their rows."""
        outputs = self.core.encoder_outputs
        while outputs.orders:
            for order in outputs.take_orders():
                if order.item is None:
                    self.replica.media.release(order.identifier)
                else:
                    self.core.on_media_encoded(order.identifier, self._encode(order.item))

    def _encode(self, item: MediaItem) -> Failure | None:
        """Encodes an item; returns why it cannot be encoded."""
        try:
            fetched = fetched_item(item, self._fetch_pixels(item.identifier))
        except QuireError as error:
            return failure_of(error)
        with torch.inference_mode():
            batch = self.replica.media.encode([fetched])
        (failed,) = batch.errors
        return None if failed is None else failure_of(failed)

    def update_weights(self, new: NewWeights) -> None:
        """Updates the weights; running sequences continue with them and are computed again. Raises QuireError; then
        nothing has changed."""
        with torch.inference_mode():
            self.replica.update_weights(new)
        self.weight_version = self.replica.orders.version
        self.core.reset_prefix_cache(preempt_running=True)

    def _order_grammars(self) -> None:
        """Executes the core's grammar orders, compiling on the library's own threads, and applies the compilations
        that have ended; does not wait."""
        grammars = self.core.grammars
        for order in grammars.take_orders() if grammars.orders else ():
            if order.sequence is None:
                self._grammars.release(order.grammar_id)
                continue
            payload = order.sequence.payload
            assert isinstance(payload, Payload)
            constraint = sampling_pb2.StructuredOutput.FromString(payload.grammar)

            def done(prepared: CompileResult, grammar_id: bytes = order.grammar_id) -> None:
                self._prepared.put((grammar_id, prepared))

            self._grammars.prepare(order.grammar_id, constraint, done)
        while not self._prepared.empty():
            self._take_prepared(self._prepared.get())

    def _take_prepared(self, found: tuple[bytes, CompileResult]) -> None:
        grammar_id, prepared = found
        failure = None if prepared.error is None else failure_of(prepared.error)
        self.core.on_grammar_prepared(grammar_id, failure)

    def cancel(self, keys: Iterable[int]) -> None:
        cancel = self.core.cancel if self.adapters is None else self.adapters.cancel
        for key in keys:
            cancel(key)


def _check_supported(settings: WorkerSettings) -> None:
    """Raises InvalidArgument, naming the field, for offloading and parallelism settings, which only separate
    services support."""
    requested = {
        "kv_offloading_size": settings.kv_offloading_size > 0,
        "kv_offloading_disk": bool(settings.kv_offloading_disk),
        "kv_offloading_region": bool(settings.kv_offloading_region),
        "tensor_parallel_size": settings.tensor_parallel_size > 1,
        "pipeline_parallel_size": settings.pipeline_parallel_size > 1,
        "context_parallel_size": settings.context_parallel_size > 1,
    }
    for name, is_requested in requested.items():
        if is_requested:
            text = f"{name}: not supported by an in-process engine; use a cluster (LLM, quire up)"
            raise InvalidArgument(text, field=name)


def _limits(replica: Replica, settings: SchedulerSettings) -> CoreLimits:
    """Returns the core's limits from the sizes of the loaded replica and the scheduler's settings; only one step is
    in flight at a time."""
    sizes = replica.limits
    return CoreLimits(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_num_seqs=min(settings.max_num_seqs or sizes.max_num_seqs, sizes.max_num_seqs),
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        longest_stream_gap_s=settings.max_stream_gap_ms / 1000,
        watermark_blocks=int(settings.watermark * (sizes.num_blocks - 1)),
        max_steps_in_flight=1,
        num_speculative_tokens=replica.speculation.num_speculative_tokens,
        fixed_draft_length=replica.speculation.fixed_draft_length,
        drafts_constrained_only=replica.speculation.constrained_only,
        enable_prefix_caching=settings.enable_prefix_caching,
        prefix_grain=settings.prefix_grain,
        kv_specs=tuple(group.spec for group in sizes.layout.groups),
        encoder_capacity=replica.media.capacity,
        whole_media=replica.media.whole_items,
        policy=find_policy(settings.scheduling_policy),
    )
