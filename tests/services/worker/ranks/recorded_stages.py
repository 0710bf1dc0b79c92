"""Pipeline stages that execute as on a GPU: with device memory and recordings, which are re-executed at each replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quire.services.worker.building.environment import Environment
from quire.services.worker.building.graph_maker import GraphBuilder, RecordingTools
from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.graphs.cuda_graph import EagerRecorder
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.layers.context import ALL_TOKENS, Context
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.services.worker.layers.stages import Stage
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.replica.flight import StepInFlight
from quire.services.worker.replica.replica import Replica
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.replica_internals import give_memory_of_its_own, runner_of
from tests.services.worker.rig import Rig


def repeating_tools(_place: LayerPlacement) -> RecordingTools:
    return RecordingTools(EagerRecorder(), TorchStepEdges(), Copying)


@contextmanager
def makers() -> Iterator[list[GraphBuilder]]:
    """Graph makers of the replicas built meanwhile, in order."""
    found: list[GraphBuilder] = []

    def make(settings: WorkerSettings, model: CausalLM, site: Environment, **_: Any) -> None:
        chunks = settings.cuda_graph_chunks
        options: Any = {"samples_per_row": 1, "keeps_hidden": False, "tools": repeating_tools}
        found.append(GraphBuilder(model, 0, site.place, chunks=chunks, **options))

    with mock.patch("quire.services.worker.building.step_execution._graph_maker", make):
        yield found


def record(replica: Replica, maker: GraphBuilder) -> None:
    runner, table = runner_of(replica), replica.table
    give_memory_of_its_own(replica, runner.slot_memory.num_groups)
    maker.capture(runner, replica.limits, table.block_table)


def build_recorded(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    """Builds a recorded stage in a rank's process."""
    with makers() as found:
        part = build_part(settings, placement)
    record(part.replica, *found)
    return part


@dataclass(frozen=True, slots=True)
class Boxes:
    """Tensors in transit, by reference: they are read when received, not when sent."""

    onward: list[deque[Tensor]]  # by the stage that sent
    back: deque[Tensor] = field(default_factory=deque)
    plans: deque[pb.StepPlan] = field(default_factory=deque)  # that the later stages have not launched
    later: list[Rig] = field(default_factory=list)

    def catch_up(self) -> None:
        """Makes the later stages launch their oldest plan."""
        plan = self.plans.popleft()
        for rig in self.later:
            flight = rig.replica.launch(decode_plan(plan))
            rig.replica.record(flight, flight.launch.wait())


@dataclass(frozen=True, slots=True)
class BoxLink:
    """Link between stages in one process, as late as possible."""

    number: int
    boxes: Boxes

    def send(self, x: Tensor) -> None:
        self.boxes.onward[self.number].append(x)

    def receive(self, x: Tensor) -> None:
        x.copy_(_of_shape(self.boxes.onward[self.number - 1].popleft(), x.shape))

    def send_back(self, x: Tensor) -> None:
        self.boxes.back.append(x)

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> BoxArrival:
        return BoxArrival(self.boxes, (num_rows, hidden_size))

    def min_over_ranks(self, value: int) -> int:
        return value

    def sum_over_ranks(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class BoxArrival:
    boxes: Boxes
    shape: tuple[int, int]

    def wait(self) -> None:
        while not self.boxes.back:
            self.boxes.catch_up()

    def take(self) -> Tensor:
        self.wait()
        return _of_shape(self.boxes.back.popleft(), self.shape)


def _of_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    assert tuple(x.shape) == tuple(shape), "as many rows were sent as are awaited"
    return x


class BoxPlacement(RankPlacement):
    """Placement that joins no process group."""

    boxes: Boxes

    def join(
        self, device: torch.device, *, use_custom_all_reduce: bool = False, overlaps: bool = False
    ) -> tuple[Shard, Stage, Context]:
        return WHOLE, Stage(self.rank, self.size, BoxLink(self.rank, self.boxes)), ALL_TOKENS


class Pipeline:
    """All stages in one process; several steps may be in flight."""

    def __init__(self, folder: Path, num_stages: int, recorded: tuple[int, ...], **settings: Any) -> None:
        """`recorded`: stages with recordings; the others launch their kernels."""
        boxes = self._boxes = Boxes([deque() for _ in range(num_stages - 1)])
        settings = {"pipeline_parallel_size": num_stages, "attention_backend": "reference", **settings}
        self.rigs: list[Rig] = []
        self.num_recorded, self.num_launched = [0] * num_stages, [0] * num_stages  # steps, by stage
        for number in range(num_stages):
            placement = BoxPlacement(number, num_stages, stages=num_stages)
            object.__setattr__(placement, "boxes", boxes)
            with makers() as found:
                self.rigs.append(Rig(folder, placement=placement, record_logits=False, **settings))
            if number in recorded:
                with torch.inference_mode():
                    record(self.rigs[-1].replica, *found)
            self._count(number)
        boxes.later.extend(self.rigs[1:])
        self.scheduler = self.rigs[0].scheduler
        self._flights: deque[StepInFlight] = deque()

    @torch.inference_mode()
    def launch(self, plan: pb.StepPlan, most_under_way: int) -> None:
        """Launches a step with at most `most_under_way` earlier steps in flight."""
        self._boxes.plans.append(plan)
        self._flights.append(self.rigs[0].replica.launch(decode_plan(plan)))
        self.finish(most_under_way)

    @torch.inference_mode()
    def finish(self, most_under_way: int = 0) -> None:
        replica = self.rigs[0].replica
        while len(self._flights) > most_under_way:
            flight = self._flights.popleft()
            if not flight.launch.heads_launched:
                replica.launch_pending_heads()
            outcome = flight.launch.wait()
            replica.record(flight, outcome)
            self.scheduler.take(encode_result(flight.result(outcome, wait_us=0)))
        while not most_under_way and self._boxes.plans:
            self._boxes.catch_up()

    def _count(self, number: int) -> None:
        runner: Any = runner_of(self.rigs[number].replica)

        def counted(launch: Any, counts: list[int]) -> Any:
            def launching(*arguments: Any) -> Any:
                counts[number] += 1
                return launch(*arguments)

            return launching

        runner._launch_graph = counted(runner._launch_graph, self.num_recorded)
        runner._launch_kernels = counted(runner._launch_kernels, self.num_launched)
