"""One worker replica: plans in, results out. Ties the slot table, the record of blocks and the device together.

Everything here happens on the engine's thread. A step is launched, waited for (possibly elsewhere), and then recorded;
up to two or three may be between launch and record, and they are recorded in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.services.worker.engine.flight import Runner, StepInFlight
from quire.services.worker.kv.held_blocks import NO_PARENT, HeldBlocks, HeldReport
from quire.services.worker.kv.host_memory import BlockMove, Moving
from quire.services.worker.kv_transfer.pages import WRITTEN, Pages, ReadPages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.lora.adapters import NumberedAdapters
from quire.services.worker.offload.disk_moves import Answer, DiskMove
from quire.services.worker.offload.tiers import NOTHING_BELOW, Tiers
from quire.services.worker.runner.expert_load import ExpertLoad, LoadByLayer
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.runner.step_cost import CostModel
from quire.services.worker.sampling.features.component import check_token_ids
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.slots import NO_SLOTS, NewBlocks, Rows, SlotTable
from quire.services.worker.step.steady import Steady
from quire.services.worker.step.step_inputs import StepInputs, assemble
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition, QuireError
from quire.shared.pb.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:  # this module is also read where there is no torch
    from torch import Tensor

    from quire.services.worker.engine.orders import Orders
    from quire.services.worker.models.loading.weights import NewWeights
    from quire.services.worker.ranks.expert_balance import ExpertBalance


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the worker is."""

    num_live: int  # slots
    num_used_blocks: int  # owned by live slots
    num_cached_blocks: int  # owned by none, with known content


class Replica:
    """Owns the host's state of all slots and blocks, and the runner."""

    def __init__(
        self,
        limits: WorkerLimits,
        vocab_size: int,
        device_name: str,
        runner: Runner,
        table: SlotTable,
        *,
        speculation: Speculation | None = None,
        expert_load: ExpertLoad | None = None,
        expert_balance: ExpertBalance | None = None,
        cost_model: CostModel | None = None,
        below: Tiers = NOTHING_BELOW,
        pages: Pages | None = None,
        adapters: NumberedAdapters | None = None,
        orders: Orders | None = None,
    ) -> None:
        """`speculation` has the same table; `expert_load`: of a mixture of experts; `expert_balance`: of ranks that
        move them; `below`: for blocks that the device has no room for; `pages`: where other workers can have them;
        `orders`: carries out what operators want of all that is on the device."""
        self._orders = orders
        self._weights = orders.weights if orders is not None else None
        self.limits = limits
        self._speculation = speculation
        self._expert_load, self._expert_balance = expert_load, expert_balance
        self.cost_model = cost_model
        self.device_name = device_name
        self.adapters = adapters
        self.vocab_size = vocab_size
        self._runner = runner
        self._table = table
        self._steady = Steady(table)
        self._below = below
        self._first_weights = self._weights_name()
        self.pages = pages
        if pages is not None:
            pages.versioned_by(self._pages_name)
        self._windows = [group for group, _ in limits.layout.windows]  # KV groups that have one
        self._held = HeldBlocks(limits.num_blocks, limits.block_size, windows=bool(self._windows))
        self._roots: dict[int, bytes] = {}  # by slot
        self._refused: dict[int, QuireError] = {}  # by slot
        self._bans: dict[int, tuple[str, ...]] = {}  # by slot: see SlotAdmission
        self._last_tokens = np.zeros(limits.max_num_seqs, dtype=np.int32)  # sampled ones that are on the host

    def launch(self, plan: pb.StepPlan) -> StepInFlight:
        """Launches the step that the plan means, and brings slots and blocks to after it.

        Plans in their order, each before or after the one before it is recorded (see waits_before). Raises
        PlanViolation if the scheduler's table of slots cannot be the same as this one; of the slots nothing is then
        known until rest(). What a single sequence asks wrongly fails that alone, with the step in which it would
        have sampled or ended.
        """
        if self._orders is not None and not self._orders.sleeper.is_awake:
            raise PlanViolation("the worker is asleep")
        if self._expert_balance is not None:
            self._expert_balance.before(plan.step_id)
        if plan.dropped_queries:
            self._runner.heads.drop_queries(plan.dropped_queries)
        speculation, steady = self._speculation, self._steady
        followed = speculation.follow(plan, steady) if speculation else steady.follow(plan)
        copies = None if followed else BlockCopies.of(plan, self.limits.num_blocks)
        if copies is not None and speculation is not None:
            speculation.copy_blocks(copies)
        inputs, new_blocks, idle = (*followed, NO_SLOTS) if followed else self._apply(plan)
        moves = None if followed else BeamMoves.of(plan)
        self._hand_out(new_blocks, copies)
        if copies is not None:
            self._runner.copy_blocks(copies)
        if moves is not None:
            self._runner.settle(moves.slots)
            self._runner.move_beams(moves)
        launch = self._runner.launch(inputs, new_blocks)
        num_begun = speculation.num_begun if speculation else 0
        refused = self._refused_in(inputs)
        return StepInFlight(
            plan.epoch, plan.step_id, inputs, launch, refused, self._bans, idle, num_begun, copies, moves
        )

    def _apply(self, plan: pb.StepPlan) -> tuple[StepInputs, NewBlocks, Rows]:
        """A step of which anything may have changed; the slots that sit out."""
        order = self._table.order(plan)
        if len(order.released):
            self._runner.settle(order.released.astype(np.intp))  # what they sample means nothing, but is still to come
        for slot in order.released.tolist():
            self._release(slot)
        for admission in order.admitted:
            self._admit(admission)
        speculation = self._speculation
        step, drafts = speculation.advance(order) if speculation else (self._table.advance(order), None)
        inputs = assemble(step, self._table, drafts)
        if drafts is None and not len(order.idle):
            self._steady.take(plan, inputs)
        else:
            self._steady.forget()
        return inputs, order.new_blocks, order.idle

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts per sequence and step."""
        return self._speculation.num_speculative_tokens if self._speculation else 0

    @property
    def fixed_draft_length(self) -> bool:
        return self._speculation is not None and not self._speculation.adaptive

    @property
    def drafts_constrained_only(self) -> bool:
        return self._speculation is not None and self._speculation.constrained_only

    def waits_before(self, plan: pb.StepPlan) -> bool:
        """Whether every launched step must have been recorded before this one is."""
        return self._speculation is not None and self._speculation.waits_before(plan)

    def record(self, flight: StepInFlight, output: RunnerOutput) -> None:
        """The step has been executed: its tokens are known and their KV is where it belongs."""
        inputs = flight.inputs
        if flight.copies is not None:
            self._held.copy(flight.copies.sources, flight.copies.targets)
        if flight.moves is not None:
            self._last_tokens[flight.moves.slots] = flight.moves.token_ids
        token_ids = inputs.token_ids.copy()  # the device may still be reading the original
        token_ids[inputs.prev_sampled_tokens] = self._last_tokens[inputs.prev_sampled_slots]
        places = inputs.slot_mapping
        if output.moved is not None:
            sources, targets = (inputs.sampling_tokens[rows] for rows in (output.moved.sources, output.moved.targets))
            token_ids[targets] = token_ids[sources]
            self._runner.move_tokens(places[sources], places[targets])
        if self.limits.num_groups > 1:
            token_ids = np.tile(token_ids, self.limits.num_groups)
        if output.refused_tokens is not None:
            right = np.ones(inputs.num_tokens, dtype=np.bool_)
            right[inputs.sampling_tokens[output.refused_tokens]] = False  # a row is refused with the draft before it
            right = np.tile(right, self.limits.num_groups)
            places, token_ids = places[right], token_ids[right]
        self._held.write(places, token_ids)
        self._last_tokens[inputs.sampled_slots] = output.last_tokens
        if self._speculation is not None:
            self._speculation.record(inputs, output, flight.num_begun)

    def settle(self) -> None:
        """The oldest launch that is not settled is so now: waits for the stages behind this one."""
        self._runner.settle()

    @property
    def num_host_blocks(self) -> int:
        """That it can keep in host memory."""
        return self._below.host_memory.num_places if self._below.host_memory else 0

    def move(self, order: pb.Transfer) -> Moving:
        """Begins to move blocks, behind the steps that have been launched. Raises PlanViolation, or what the device
        raises: then nothing is known of what was to be written."""
        move = BlockMove.of(order, self.limits.num_blocks, self.num_host_blocks, self.limits.num_groups)
        assert self._below.host_memory is not None, "it has no places otherwise"
        if move.to_host:
            return self._below.host_memory.begin(move)
        self._held.lose(move.blocks)
        moving = self._below.host_memory.begin(move)
        self._held.fill(move.blocks, move.names)
        return moving

    @property
    def num_query_vectors(self) -> int:
        """That it keeps for documents to be compared with."""
        return self._runner.heads.num_query_vectors

    @property
    def num_disk_blocks(self) -> int:
        """That it can keep on disk."""
        return self._below.disk.num_places if self._below.disk else 0

    def move_on_disk(self, order: pb.DiskTransfer, answer: Answer) -> None:
        """Begins to move blocks, from any thread: see DiskStore. Raises PlanViolation."""
        move = DiskMove.of(order, self.num_host_blocks, self.num_disk_blocks, self.limits.num_groups)
        assert self._below.disk is not None, "it has no places otherwise"
        self._below.disk.begin(move, answer)

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages:
        """Begins to read blocks, or to wait for what they hold, behind the steps that have been launched. Raises
        FailedPrecondition for what has been forgotten, or what the device raises."""
        assert self.pages is not None, "nobody asks otherwise"
        if not self._held.knows(blocks):
            raise FailedPrecondition("block_ids: some hold nothing that is known here", field="block_ids")
        return self.pages.read(blocks) if copied else self.pages.filled()

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> Moving:
        """Begins to write what came from another worker into blocks that nobody owns."""
        assert self.pages is not None, "nobody asks otherwise"
        self._held.lose(blocks)
        return self.pages.write(blocks, pages)

    def believe_pages(self, blocks: U32, hashes: list[bytes]) -> Moving:
        """What has been written into these blocks is what it should be: a GPU's memory may have changed under the copy,
        and who attaches meanwhile must not be told of it."""
        self._held.fill(blocks, hashes)
        return WRITTEN

    def rest(self) -> HeldReport:
        """Ends an epoch: forgets all slots, and reports the blocks whose content is known."""
        if self.pages is not None:
            self.pages.settle()
        for slot in np.flatnonzero(self._table.live).tolist():
            self._release(slot)
        self._table.clear()
        self._steady.forget()
        self._runner.heads.forget_queries()
        report = self._held.report()
        if self._below.disk is not None:  # before host memory: what is on its way there does not come any more
            report = replace(report, on_disk=self._below.disk.settle())
        if self.adapters is not None:
            report = replace(report, adapters=[(held.id, held.path) for held in self.adapters.held()])
        if self._weights is not None:
            report = replace(report, weights=self._weights.id)
        if self._orders is not None:
            self._orders.drop_weights()
            sleeper = self._orders.sleeper
            report = replace(report, asleep=sleeper.asleep, sleep_level=sleeper.level)
        return replace(report, in_host_memory=self._below.host_memory.held()) if self._below.host_memory else report

    def forget_cache(self) -> None:
        self._held.forget()
        self._runner.heads.forget_queries()
        if self._below.host_memory is not None:
            self._below.forget(
                # Weights that were changed are in no folder: nobody finds their blocks again.
                changed=self._weights_name() != self._first_weights
            )
        if self._speculation is not None:
            self._speculation.forget()

    @property
    def weight_version(self) -> str:
        """Of the weights that the next step is computed with; empty where they cannot be changed."""
        return self._weights.version if self._weights else ""

    def update_weights(self, new: NewWeights) -> None:
        """Between two steps; no block holds anything afterwards. Raises QuireError, and then nothing has changed."""
        if self._weights is None:
            raise FailedPrecondition("the weights of this worker cannot be changed: its model is no decoder")
        self._weights.update(new)
        self.forget_cache()

    def _pages_name(self) -> str:
        """What sleeps can be had by nobody."""
        is_awake = self._orders is None or self._orders.sleeper.is_awake
        return self._weights_name() if is_awake else "asleep"

    @property
    def spooled_weights(self) -> str:
        """The folder of those that came as a stream. Any thread may ask."""
        return self._weights.id.spooled if self._weights else ""

    def _weights_name(self) -> str:
        """No two updates have the same."""
        return f"{self._weights.id.update} {self._weights.id.version}" if self._weights else ""

    @property
    def stages_beside_steps(self) -> bool:
        """Weights."""
        return self._weights is None or self._weights.stages_beside_steps

    def obey_beside_steps(self, order: pb.DeviceOrder) -> None:
        """One of BESIDE_STEPS, on any thread, where weights are staged beside steps. Raises QuireError, and then
        nothing has changed."""
        self._with_orders().obey(order)

    def drop_weights(self) -> None:
        """That are staged, on the same thread."""
        if self._orders is not None:
            self._orders.drop_weights()

    def obey(self, order: pb.DeviceOrder) -> None:
        """While no step is in flight. Raises QuireError, and then nothing has changed."""
        if self._with_orders().obey(order):
            self.forget_cache()

    def interrupt(self, order: pb.DeviceOrder) -> None:
        """This order has come, and is still to be obeyed: see Orders.interrupt()."""
        if self._orders is not None:
            self._orders.interrupt(order)

    def _with_orders(self) -> Orders:
        if self._orders is None:
            raise FailedPrecondition("the weights of this worker neither change nor sleep: its model is no decoder")
        return self._orders

    def occupancy(self) -> Occupancy:
        owned = self._table.owned_blocks()
        cached = self._held.complete() & ~owned
        return Occupancy(self._table.num_live, int(np.count_nonzero(owned)), int(np.count_nonzero(cached)))

    def expert_load(self) -> LoadByLayer:
        """By layer with experts, how many tokens each has had, padding included."""
        return self._expert_load.read() if self._expert_load else {}

    def _admit(self, admission: pb.Admission) -> None:
        slot, tokens = admission.slot, self._table.given_tokens[admission.slot]
        self._roots[slot] = admission.root_hash
        try:
            check_token_ids(tokens, self.vocab_size, "token_ids")
            asked = SlotAdmission.of(admission)
            self._runner.heads.admit(slot, asked)
            if asked.bans:
                self._bans[slot] = asked.bans
        except QuireError as error:
            self._refused[slot] = error
            # It is computed all the same, and the scheduler counts on what its blocks then hold.
            self._table.given_tokens[slot] = np.where((tokens >= 0) & (tokens < self.vocab_size), tokens, 0)
        if self._speculation is not None:
            self._speculation.begin(slot, self._table.given_tokens[slot])

    def _release(self, slot: int) -> None:
        self._roots.pop(slot, None)
        self._refused.pop(slot, None)
        self._bans.pop(slot, None)
        if self._speculation is not None:
            self._speculation.end(slot)
        self._runner.heads.release(slot)

    def _hand_out(self, new: NewBlocks, copies: BlockCopies | None) -> None:
        """Tells the record about blocks that start anew: all but those an admission brought along as cached, unless
        they are only now filled with that."""
        if not len(new.ids):
            return
        table, several = self._table, self._table.num_groups > 1
        cached = -(-table.num_cached_tokens[new.slots] // self.limits.block_size)
        positions = new.columns % table.width if several else new.columns
        starts = positions >= cached
        if copies is not None:
            starts |= np.isin(new.ids, copies.targets)
        fresh = starts.nonzero()[0]
        slots, positions, ids = new.slots[fresh], positions[fresh], new.ids[fresh]
        before = table.block_table[slots, np.maximum(new.columns[fresh] - 1, 0)]
        parents = np.where(positions > 0, before, NO_PARENT)
        firsts = (positions == 0).nonzero()[0].tolist()
        roots = {int(ids[i]): self._roots[int(slots[i])] for i in firsts}
        groups = new.columns[fresh] // table.width if several else 0
        if copies is not None and self._windows:  # of what they are behind, the window may have slid over
            parents[np.isin(ids, copies.targets) & np.isin(groups, self._windows)] = NO_PARENT
        self._held.hand_out(ids, parents, roots, groups)

    def _refused_in(self, inputs: StepInputs) -> dict[int, QuireError]:
        if not self._refused:
            return {}
        due = {*inputs.sampling_slots.tolist(), *inputs.ended_slots.tolist()}
        return {slot: error for slot, error in self._refused.items() if slot in due}
