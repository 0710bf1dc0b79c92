"""A scheduler's core and a worker of several ranks, of which rank 0 is in this process."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.services.scheduler.core.limits import TierLimits
from quire.services.worker.building.rank_processes import start
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.ranks import placement
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from quire.services.worker.replica.flight import StepInFlight
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from tests.spec_decode.pair import Pair, build, settings_of


class RankedPair(Pair):
    """A pair in which a step of several stages stays in flight until its result is requested."""

    def __init__(self, group: ReplicaRanks, *arguments: Any, **limits: Any) -> None:
        self.group = group
        super().__init__(*arguments, **limits)

    def execute(self, plan: pb.StepPlan) -> Any:
        flight = self.group.broadcast(decode_plan(plan)), self.replica.launch(decode_plan(plan))
        return self._finished(*flight) if flight[1].launch.heads_launched else flight

    def result(self) -> None:
        if isinstance(self.results[0], tuple):
            with torch.inference_mode():
                self.results[0] = self._finished(*self.results[0])
        super().result()

    def _finished(self, ticket: int, flight: StepInFlight) -> pb.StepResult:
        if not flight.launch.heads_launched:
            self.group.settle_step()
            self.replica.launch_pending_heads()
        outcome = flight.launch.wait()
        self.group.collect(ticket, flight.inputs)
        self.replica.record(flight, outcome)
        return encode_result(flight.result(outcome, wait_us=0))

    def encode_item(self, item: FetchedItem) -> None:
        self.group.encode_media([item])
        super().encode_item(item)

    def release_item(self, identifier: bytes) -> None:
        super().release_item(identifier)
        self.group.release_media(identifier)

    def move(self, order: pb.Transfer) -> None:
        pending = self.replica.transfers.move(order)
        self.group.move_blocks(order)
        pending.wait()
        self.group.blocks_moved(order.transfer_id)


@contextlib.contextmanager
def ranked_pair(
    folder: Path,
    size: int = 2,
    stages: int = 1,
    speculation: Mapping[str, Any] | None = None,
    *,
    build_part: Callable[[WorkerSettings, RankPlacement], RankReplica] = start.build_part,
    **settings: Any,
) -> Iterator[RankedPair]:
    """Runs a pair. `size`: ranks of each of the `stages`; `build_part`: builds the other ranks."""
    values = {"tensor_parallel_size": size, "pipeline_parallel_size": stages, **settings}
    worker = settings_of(speculation, folder, **values)
    group = ReplicaRanks(worker.num_ranks, functools.partial(build_part, worker), stages)
    run = None
    try:
        replica = build(speculation, folder, group.placements[0], **values)
        group.wait_ready()
        host = replica.transfers.num_host_blocks
        limits: dict[str, Any] = {"tiers": TierLimits(host)} if host else {}
        run = RankedPair(group, replica, num_micro_batches=stages, **limits)
        del replica
        yield run
    finally:
        group.stop(10.0)
        if run is not None:  # CUDA graphs that hold collectives
            del run.replica
            gc.collect()
        placement.leave()
