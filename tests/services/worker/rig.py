"""A replica on the CPU, built as for users, with a reference scheduler; logits of every step are recorded."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.ranks.placement import SINGLE_RANK, RankPlacement
from quire.services.worker.replica.replica import Replica
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from tests.services.worker import recorded_logits
from tests.services.worker.plans import Block, New, PaperScheduler
from tests.services.worker.replica_internals import runner_of


class Rig:
    """Executes steps to their end, one after the other."""

    def __init__(
        self, folder: Path, *, record_logits: bool = True, placement: RankPlacement = SINGLE_RANK, **settings: Any
    ) -> None:
        """Without `record_logits`, plain sampling stays part of CUDA graphs."""
        worker = self.settings(folder, **settings)
        self.grammars = CompilePool(lambda: open_grammars(worker))
        with torch.inference_mode():
            self.replica: Replica = build_replica(worker, self.grammars, placement=placement)
        limits = self.replica.limits
        num_groups = 0 if limits.layout.has_no_kv else limits.num_groups
        self.scheduler = PaperScheduler(
            worker.block_size, worker.num_blocks, num_groups=num_groups, num_stages=limits.num_micro_batches
        )
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)  # by slot, a row per sampled token
        if record_logits:
            self._spy(self.replica)

    @staticmethod
    def settings(folder: Path, **settings: Any) -> WorkerSettings:
        """The rig's settings with the given ones; otherwise worker defaults: compiled kernels, a tape
        where possible."""
        values = {"dtype": "float32", "block_size": 4, "num_blocks": 128, "max_num_seqs": 8, "threads": 1}
        return WorkerSettings(model=str(folder), **(values | settings))

    def step(
        self, new: list[New] | None = None, counts: dict[int, int] | None = None, released: list[int] | None = None
    ) -> dict[int, int]:
        """Executes a step; returns sampled tokens by slot."""
        self.last_result = self.execute(self.scheduler.plan(new, counts, released))
        return self.scheduler.take(self.last_result)

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        with torch.inference_mode():
            flight = self.replica.launch(decode_plan(plan))
            outcome = flight.launch.wait()
            self.replica.record(flight, outcome)
            return encode_result(flight.result(outcome, wait_us=0))

    def end_epoch(self) -> None:
        """Resets the replica as at the end of an attachment."""
        self.replica.end_epoch()
        self.scheduler.rows.clear()
        self.scheduler.sampling.clear()

    def tokens(self, slot: int) -> list[int]:
        return self.scheduler.rows[slot].tokens

    def blocks(self, slot: int) -> tuple[Block, ...]:
        return tuple(self.scheduler.rows[slot].blocks)

    def _spy(self, replica: Replica) -> None:
        def keep(logits: torch.Tensor, slots: Any) -> None:
            for slot, row in zip(slots.tolist(), logits, strict=True):
                self.logits[slot].append(row.to("cpu", copy=True))

        recorded_logits.record(runner_of(replica).sampler, keep)
