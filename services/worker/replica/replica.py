"""A worker replica: ties the slot table, the record of blocks and the device together; plans in, results out.

Everything runs on the device thread. A step is launched, waited for (possibly on another thread) and then recorded; up
to two or three steps may be between launch and record, and they are recorded in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.replica.block_record import BlockRecord
from quire.services.worker.replica.block_transfers import BlockTransfers
from quire.services.worker.replica.component import PlanHook, ReplicaComponent
from quire.services.worker.replica.device_orders import DeviceOrderHandler, NoDeviceOrders
from quire.services.worker.replica.flight import NO_REFUSALS, NO_STEP_CHANGES, Runner, StepInFlight
from quire.services.worker.replica.media_encoding import NoMediaEncoding
from quire.services.worker.replica.mixture_experts import MixtureExperts
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.replica.slot_states import SlotStates
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.runner.step_cost import NO_COST_MODEL, CostModel, NoCostModel
from quire.services.worker.spec_decode.no_speculation import NoSpeculation
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.rope_positions import PlainPositions, RopePositions
from quire.shared.pb.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:  # this module is also imported without torch
    from quire.services.worker.models.loading.weights import NewWeights


# Orders after which the rows of media are not valid any more, or whose purpose is to free memory.
DROPS_ROWS = frozenset({"swap_weights", "sleep"})


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Numbers of live slots and of used and cached blocks at one time."""

    num_live: int  # slots
    num_used_blocks: int  # owned by live slots
    num_cached_blocks: int  # not owned, with known content
    num_encoder_rows: int = 0  # kept for media items
    num_encoder_items: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Constant properties of a replica."""

    limits: WorkerLimits
    vocab_size: int
    device_name: str
    cost_model: CostModel | NoCostModel = NO_COST_MODEL
    rotates_by_axes: bool = False  # pictures have positions by row and column


class Replica:
    """Owns the host's state of all slots and blocks, the runner and the components."""

    def __init__(
        self,
        facts: ReplicaFacts,
        runner: Runner,
        record: BlockRecord,
        *,
        speculation: Speculation | NoSpeculation,
        orders: DeviceOrderHandler | NoDeviceOrders,
        transfers: BlockTransfers,
        experts: MixtureExperts,
        media: NoMediaEncoding | None = None,
    ) -> None:
        """Ties the parts together. `speculation` shares the table of `record`; `orders`, `transfers`, `experts`
        and `media` are the components, whose hooks run on plans, ends of epochs and cache resets; without `media` the
        replica encodes none."""
        self.limits, self.vocab_size, self.device_name = facts.limits, facts.vocab_size, facts.device_name
        self.cost_model = facts.cost_model
        self.speculation, self.orders, self.transfers, self.experts = speculation, orders, transfers, experts
        self.media = media or NoMediaEncoding()
        self._runner, self._record = runner, record
        positions = RopePositions(facts.limits.max_num_seqs) if facts.rotates_by_axes else PlainPositions()
        num_blocks = facts.limits.num_blocks
        self._slots = SlotStates(
            record, runner, speculation, facts.vocab_size, num_blocks=num_blocks, positions=positions
        )
        self._steady = self._slots.steady
        self._components: tuple[ReplicaComponent, ...] = (orders, experts, transfers, self.media)
        self._plan_hooks = self._collect_plan_hooks()
        self.adapters = runner.adapters
        self.pages = transfers.pages
        self.table = record.table

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Applies a plan to slots and blocks and launches its step.

        Plans come in order, each before or after the previous step is recorded (see Speculation.waits_before). Raises
        PlanViolation if the scheduler's slot table must differ from this one; the state of the slots is then undefined
        until end_epoch(). An invalid request of a single sequence fails that sequence alone, in the step in which it
        would have sampled or ended."""
        for hook in self._plan_hooks:
            hook(plan)
        if plan.changes.dropped_queries:
            self._runner.heads.drop_queries(plan.changes.dropped_queries)
        slots = self._slots
        followed = self.speculation.follow(plan, self._steady)
        inputs, new_blocks, changes = (*followed, NO_STEP_CHANGES) if followed else slots.apply_plan(plan)
        if len(new_blocks.ids):
            self._record.record_allocations(new_blocks, changes.copies)
        launch = self._runner.launch(inputs, new_blocks)
        refused = slots.due_refusals(inputs) if slots.refused else NO_REFUSALS
        num_begun = self.speculation.num_begun
        return StepInFlight(plan.epoch, plan.step_id, inputs, launch, refused, slots.bans, changes, num_begun)

    def record(self, flight: StepInFlight, output: RunnerOutput) -> None:
        """Records an executed step: its tokens are known and their KV is written. Moves the KV of accepted tree tokens
        to their places and updates the speculation."""
        inputs = flight.inputs
        self._record.record(inputs, flight.changes, output)
        if output.token_moves is not None:
            self._runner.move_tokens(*output.token_moves.of_tokens(inputs.slot_mapping[inputs.sampling_tokens]))
        self.speculation.record(inputs, output, flight.num_begun)

    def launch_pending_heads(self) -> None:
        """Launches the heads of the oldest step that waits for other stages, and waits for those stages."""
        self._runner.launch_pending_heads()

    def end_epoch(self) -> RetainedState:
        """Ends an epoch: releases all slots, drops cached query vectors and staged weights, and returns what the worker
        retains."""
        self._slots.clear()
        self._runner.heads.clear_queries()
        held = [(adapter.id, adapter.path) for adapter in self.adapters.loaded()]
        report = replace(self._record.report(), adapters=held)
        for component in self._components:
            report = component.end_epoch(report)
        return report

    def reset_cache(self) -> None:
        """Discards all cached KV on the device, in host memory and on disk, and cached query vectors."""
        self._record.contents.reset()
        self._runner.heads.clear_queries()
        for component in self._components:
            component.reset_cache()
        self.speculation.clear_history()

    def execute_order(self, order: pb.DeviceOrder) -> None:
        """Executes a device order while no step is in flight and resets the cache if its KV became invalid. Raises
        QuireError and then changes nothing."""
        try:
            if self.orders.execute_order(order):
                self.reset_cache()
        finally:
            self._plan_hooks = self._collect_plan_hooks()
        if order.WhichOneof("order") in DROPS_ROWS:
            self.media.clear()

    def _collect_plan_hooks(self) -> list[PlanHook]:
        return [hook for component in self._components for hook in component.plan_hooks]

    def update_weights(self, new: NewWeights) -> None:
        """Replaces the weights between two steps and resets the cache. Raises QuireError and then changes nothing."""
        self.orders.update(new)
        self.reset_cache()
        self.media.clear()

    def occupancy(self) -> Occupancy:
        media = self.media
        return Occupancy(self.table.num_live, *self._record.count_blocks(), media.num_rows, media.num_items)

    @property
    def num_query_vectors(self) -> int:
        """Capacity for query vectors that documents are compared with (late interaction)."""
        return self._runner.heads.num_query_vectors
