"""Beam searches under way: each beam has a slot, and shares the blocks of what it has in common with the others.

A search waits in the queue as one sequence, its root, and comes in as a whole, with slots set aside for all beams
that it may have. When each of its beams has told its candidates, the search decides; a later step carries that out:
of the beams that go on from one, the first stays where it is, the others take over its blocks, in slots of beams that
ended or in new ones. Full blocks are shared; the last block is copied for each, because each writes on in its own. A
beam has never two steps under way: what follows is only known here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.scheduler.core.beam.moves import BeamMover
from services.scheduler.core.beam.search import BeamSearch, Child, Entries, Node
from services.scheduler.core.drafts.rows import DraftedRows
from services.scheduler.core.plan import Finished, LogprobColumns, Logprobs, TokenColumns
from services.scheduler.core.scheduling.plan_builder import PlanBuilder
from services.scheduler.core.sequence import Failure, Reason, Sequence
from shared import block_hash
from shared.columns import i32_bytes

if TYPE_CHECKING:
    from services.scheduler.core.core import Core

TOO_FEW_BLOCKS = Failure("RESOURCE_EXHAUSTED", "beam_search: the beams need more KV blocks than this worker has")
TOO_FEW_RESULTS = Failure("INVALID_ARGUMENT", "beam_search: there are fewer sequences than n asks for")
Keys = npt.NDArray[np.int64]
FIRST_KEY = -2  # of the beams' sequences, which nobody finds by their keys; -1 is nobody's


@dataclass(slots=True, eq=False)
class Beam:
    """A live beam in a slot."""

    sequence: Sequence
    candidates: Entries | None = None  # None: still to come

    @property
    def slot(self) -> int:
        return self.sequence.slot


@dataclass(slots=True, eq=False)
class Group:
    """A search that has slots."""

    root: Sequence
    search: BeamSearch
    beams: list[Beam] = field(default_factory=list)  # as search.live before the decision
    decision: list[Child] | None = None  # what is to be carried out

    @property
    def num_reserved(self) -> int:
        """Slots that it may still need."""
        return self.search.rules.width - len(self.beams)


class Beams:
    """The searches of a core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._mover = BeamMover(core)
        self._groups: dict[int, Group] = {}  # by the root's key
        self._of: dict[int, tuple[Group, Beam]] = {}  # by the key of the beam's sequence
        self._keys = itertools.count(FIRST_KEY, -1)

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def num_reserved(self) -> int:
        return sum(group.num_reserved for group in self._groups.values())

    @property
    def num_tokens_wanted(self) -> int:
        """By beams that can go on."""
        return sum(len(group.decision) for group in self._groups.values() if group.decision is not None)

    def slots_of(self, root: Sequence) -> list[int]:
        return [beam.slot for beam in self._groups[root.key].beams]

    def root_of(self, key: int) -> Sequence | None:
        """The search that a sequence is a beam of."""
        found = self._of.get(key)
        return None if found is None else found[0].root

    # Coming and going.

    def admit(self, builder: PlanBuilder, root: Sequence, now: float) -> bool:
        """Lets the search at the head of the queue in, if there is room for all of it; whether the queue moved on."""
        core, search = self._core, root.search
        assert search is not None
        if core.running.num_free_slots - self.num_reserved < search.rules.width:
            return False
        if not self._fits(root, search):
            if len(core.running) or core.kv.num_fenced:
                return False
            core.end(root, Reason.ERROR, failure=TOO_FEW_BLOCKS)
            return True
        beams = [self._new_beam(root, node) for node in search.live]
        core.next_waiting()
        group = self._groups[root.key] = Group(root, search)
        for beam in beams:
            self._enter(group, beam)
            core.admitter.occupy(builder, beam.sequence)
        core.admitter.count(root, beams[0].sequence.num_cached_tokens, now)
        return True

    def _fits(self, root: Sequence, search: BeamSearch) -> bool:
        """Even if none of its beams finds another's blocks in the cache."""
        kv = self._core.kv
        lengths = [root.num_tokens + (0 if node is None else node.length) for node in search.live]
        return sum(map(kv.blocks_for, lengths)) <= kv.pool.num_free

    def _enter(self, group: Group, beam: Beam) -> None:
        group.beams.append(beam)
        self._of[beam.sequence.key] = group, beam

    def _new_beam(self, root: Sequence, node: Node | None) -> Beam:
        """With what it has said so far."""
        said = [] if node is None else [step.token for step in node.path()]
        return self._beam_of(root, bytes(root.tokens) + i32_bytes(said))

    def _beam_of(self, root: Sequence, tokens: bytes) -> Beam:
        sequence = Sequence(
            key=next(self._keys),
            owner=root.owner,
            sequence_id=root.sequence_id,
            tokens=bytearray(tokens),
            num_prompt_tokens=root.num_prompt_tokens,
            max_total_tokens=root.max_total_tokens,
            root_hash=root.root_hash,
            block_hashes=block_hash.chain(root.root_hash, tokens, self._core.limits.block_size),
            skip_reading_prefix_cache=root.skip_reading_prefix_cache,
            asks_logprobs=True,
            is_beam=True,
            payload=root.payload,
            request_id=root.request_id,
            order=root.order,
            tenant_index=root.tenant_index,
        )
        return Beam(sequence)

    def leave(self, root: Sequence) -> int:
        """Takes all slots of the search; returns the step to wait for before it may run again, 0 if there is none."""
        group = self._groups.pop(root.key)
        fences = [self._core.take_slot(beam.sequence) or 0 for beam in group.beams]
        for beam in group.beams:
            del self._of[beam.sequence.key]
        return max(fences)

    def abandon(self) -> list[Sequence]:
        """The worker is gone with all slots: the roots."""
        roots = [group.root for group in self._groups.values()]
        self._groups.clear()
        self._of.clear()
        return roots

    # A step.

    def carry_out(self, builder: PlanBuilder) -> None:
        """What has been decided since the last step, as far as there is room."""
        for group in list(self._groups.values()):
            if group.decision is not None and self._groups.get(group.root.key) is group:
                self._carry_out(builder, group)

    def _carry_out(self, builder: PlanBuilder, group: Group) -> None:
        assert group.decision is not None
        slots = [beam.slot for beam in group.beams]
        moves = self._mover.plan(slots, [child.parent for child in group.decision])
        if moves.num_blocks > self._core.kv.pool.num_free:
            self._make_room(builder, group)
            return
        for slot in moves.ended:
            beam = next(beam for beam in group.beams if beam.slot == slot)
            del self._of[beam.sequence.key]
            group.beams.remove(beam)
            self._core.take_slot(beam.sequence)
        by_slot = {beam.slot: beam for beam in group.beams}
        group.beams = []
        for child, target in zip(group.decision, moves.targets, strict=True):
            parent = slots[child.parent]
            if target is None:
                beam = self._beam_of(
                    group.root, self._core.running.known_tokens(parent) + i32_bytes([child.node.token])
                )
                self._of[beam.sequence.key] = group, beam
            else:
                beam = by_slot[target]
            beam.candidates = None
            group.beams.append(beam)
        tokens = [child.node.token for child in group.decision]
        builder.budget.left -= len(tokens)
        self._mover.carry_out(builder, moves, [beam.sequence for beam in group.beams], tokens)
        group.decision = None

    def _make_room(self, builder: PlanBuilder, group: Group) -> None:
        core = self._core
        builder.short_of_blocks = True
        others = any(self.root_of(int(key)) is not group.root for key in core.running.keys[core.running.live])
        if others or core.kv.num_fenced:
            core.grower.make_room(builder)
        else:
            core.end(group.root, Reason.ERROR, failure=TOO_FEW_BLOCKS)

    def hold(self, builder: PlanBuilder) -> None:
        """Beams that do nothing in this step, though they have one token to go."""
        running = self._core.running
        for group in self._groups.values():
            for beam in group.beams:
                if running.num_computed[beam.slot] == running.num_tokens[beam.slot] - 1 and not builder.computes(
                    beam.slot
                ):
                    builder.sit_out(beam.slot)

    def take(self, keys: Keys, rows: DraftedRows) -> None:
        """A step returned `rows` for beams with these keys. Searches whose candidates are all there decide."""
        if rows.logprobs is None:
            return
        told = rows.logprobs.split([1] * len(rows.logprobs.ranks))
        touched: dict[int, Group] = {}
        for key, entries in zip(keys[rows.asked].tolist(), told, strict=True):
            found = self._of.get(key)
            if found is not None:
                group, beam = found
                beam.candidates = Entries(entries.token_ids[1:], entries.logprobs[1:])
                touched[group.root.key] = group
        for group in touched.values():
            if all(beam.candidates is not None for beam in group.beams):
                self._decide(group)

    def _decide(self, group: Group) -> None:
        children = group.search.advance([beam.candidates for beam in group.beams if beam.candidates is not None])
        if children:
            group.decision = children
        else:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        """The best sequences, each in one piece, then their ends."""
        core, root = self._core, group.root
        results = group.search.results
        sequence_ids = [output.sequence_id for output in root.outputs[: len(results)]]
        if results:
            core.events.tokens.append(_columns(root, sequence_ids, [hypothesis.node.path() for hypothesis in results]))
        core.counts.generated_tokens += sum(hypothesis.node.length for hypothesis in results)
        core.forget(root, Reason.STOP)
        for output, hypothesis in zip(root.outputs, results, strict=False):
            stop = root.stop_token_id(hypothesis.node.token) if hypothesis.reason is Reason.STOP else None
            core.events.finished.append(Finished(output, hypothesis.reason, stop, score=hypothesis.score))
        for output in root.outputs[len(results) :]:
            core.events.finished.append(Finished(output, Reason.ERROR, failure=TOO_FEW_RESULTS))


def _columns(root: Sequence, sequence_ids: list[int], paths: list[list[Node]]) -> TokenColumns:
    lengths = np.array([len(path) for path in paths], dtype=np.uint32)
    nodes = [node for path in paths for node in path]
    columns = TokenColumns(
        np.full(len(sequence_ids), root.owner, dtype=np.int32),
        np.array(sequence_ids, dtype=np.uint32),
        np.array([node.token for node in nodes], dtype=np.int32),
        lengths,
    )
    if root.num_logprobs is None:
        return columns
    most = root.num_logprobs
    of_positions = np.repeat(np.arange(len(sequence_ids)), lengths)
    entries = Logprobs(
        np.array([1 + len(node.candidates.token_ids[:most]) for node in nodes], dtype=np.uint32),
        np.concatenate([[node.token, *node.candidates.token_ids[:most]] for node in nodes]).astype(np.int32),
        np.concatenate([[node.logprob, *node.candidates.logprobs[:most]] for node in nodes]).astype(np.float32),
        np.array([node.rank for node in nodes], dtype=np.uint32),
    )
    told = LogprobColumns(columns.owners[of_positions], columns.sequence_ids[of_positions], entries)
    return TokenColumns(columns.owners, columns.sequence_ids, columns.token_ids, lengths, told)
