"""Running beam searches: each beam holds a slot and shares the KV blocks of its common prefix with the other beams.

A search waits in the queue as one sequence, its root, and is admitted as a whole, with slots reserved for all beams
that it may have. When every beam of a search has returned its candidates, the search decides which beams continue; a
later step applies that decision: of the beams that continue one parent, the first stays in the parent's slot, the
others share its blocks in slots of beams that ended or in new slots. Full blocks are shared; the last, partial block is
copied for each beam, because each writes its own tokens into it. A beam never has two steps in flight: its next token
is known only after the search has decided.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.beam.moves import BeamMover
from quire.services.scheduler.core.drafts.rows import DraftedRows
from quire.services.scheduler.core.plan import LogprobColumns, Logprobs, SequenceFinished, TokenColumns
from quire.services.scheduler.core.running.searches import Beam, RunningSearch
from quire.services.scheduler.core.scheduling.preemption import preempt_for_blocks
from quire.services.scheduler.core.scheduling.sequence_starter import SequenceStarter
from quire.services.scheduler.core.sequences.beam_search import BeamCandidates, BeamNode, BeamSearchState
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash

TOO_FEW_BLOCKS = Failure(
    "RESOURCE_EXHAUSTED",
    "beam_search: the beams need more KV blocks than this worker has; send a shorter prompt or a smaller width",
)
TOO_FEW_RESULTS = Failure("INVALID_ARGUMENT", "beam_search: fewer sequences were found than n requests")
Keys = npt.NDArray[np.int64]
FIRST_BEAM_KEY = -2  # keys of beams count down from here; no submission has a negative key, -1 marks a free slot


class BeamScheduler:
    """Schedules all beam searches of a core: admits them, moves their beams to the slots of their children, and
    applies the candidates that steps return."""

    def __init__(self, state: CoreState, starter: SequenceStarter) -> None:
        self._state = state
        self._starter = starter
        self._groups = state.searches
        self._mover = BeamMover(state.tables)
        self._keys = itertools.count(FIRST_BEAM_KEY, -1)

    # Admission.

    def admit(self, builder: PlanBuilder, root: Sequence, now: float) -> bool:
        """Admits the beam search at the head of the queue if slots and blocks for all its beams are free; returns
        True if the queue advanced. A search that does not fit although nothing else runs finishes with an error,
        which also advances the queue."""
        state, search = self._state, root.search
        assert search is not None
        if state.running.num_free_slots - self._groups.num_reserved < search.rules.width:
            return False
        if not self._fits(root, search):
            if len(state.running) or state.kv.num_fenced:
                return False
            state.finish(root, Reason.ERROR, failure=TOO_FEW_BLOCKS)
            return True
        beams = [self._new_beam(root, node) for node in search.live]
        state.queue.pop()
        group = self._groups.add(root, search)
        for beam in beams:
            self._groups.add_beam(group, beam)
            self._starter.start_beam(builder, beam.sequence)
        self._starter.record_admission(root, beams[0].sequence.num_cached_tokens, now)
        return True

    def _fits(self, root: Sequence, search: BeamSearchState) -> bool:
        """Returns whether the blocks of all beams are free, even if no beam finds another beam's blocks in the
        cache."""
        kv = self._state.kv
        lengths = [root.num_tokens + (0 if node is None else node.length) for node in search.live]
        return sum(map(kv.blocks_for, lengths)) <= kv.num_free - self._starter.num_missing_cross(root)

    def _new_beam(self, root: Sequence, node: BeamNode | None) -> Beam:
        """Creates a beam with the output tokens that it has so far."""
        output = [] if node is None else [step.token for step in node.path()]
        return self._beam_of(root, bytes(root.tokens) + i32_bytes(output))

    def _beam_of(self, root: Sequence, tokens: bytes) -> Beam:
        """Creates a beam with these known tokens (i32 column), which inherits the request's parameters and its place
        in the order from the search's root."""
        sequence = Sequence(
            key=next(self._keys),
            owner=root.owner,
            sequence_id=root.sequence_id,
            tokens=SequenceTokens(tokens),
            num_prompt_tokens=root.num_prompt_tokens,
            max_total_tokens=root.max_total_tokens,
            root_hash=root.root_hash,
            block_hashes=block_hash.chain_with_media(root.root_hash, tokens, self._state.limits.block_size, root.media),
            skip_reading_prefix_cache=root.skip_reading_prefix_cache,
            asks_logprobs=True,
            is_beam=True,
            media=root.media,
            payload=root.payload,
            request_id=root.request_id,
            order=root.order,
            tenant_index=root.tenant_index,
        )
        return Beam(sequence)

    # Steps.

    def apply_decisions(self, builder: PlanBuilder) -> None:
        """Moves the beams of searches that have decided since the last step. Without enough free blocks for a
        search, a sequence is preempted instead, or the search finishes with an error if it runs alone."""
        for group in self._groups:
            if group.decision is not None and self._groups.is_running(group):
                self._apply_decision(builder, group)

    def _apply_decision(self, builder: PlanBuilder, group: RunningSearch) -> None:
        """Releases the beams that no child continues, moves the children into their slots and schedules their next
        tokens, which count against the budget. If blocks are short, frees some instead and keeps the decision for a
        later step."""
        assert group.decision is not None
        slots = [beam.slot for beam in group.beams]
        moves = self._mover.plan(slots, [child.parent for child in group.decision])
        if moves.num_blocks > self._state.kv.num_free:
            self._free_blocks_for(builder, group)
            return
        for slot in moves.ended:
            beam = next(beam for beam in group.beams if beam.slot == slot)
            self._groups.remove_beam(group, beam)
            self._state.release_slot(beam.sequence)
        by_slot = {beam.slot: beam for beam in group.beams}
        group.beams = []
        for child, target in zip(group.decision, moves.targets, strict=True):
            parent = slots[child.parent]
            if target is None:
                beam = self._beam_of(
                    group.root, bytes(self._state.running.sequence(parent).tokens) + i32_bytes([child.node.token])
                )
            else:
                beam = by_slot[target]
            beam.candidates = None
            self._groups.add_beam(group, beam)
        tokens = [child.node.token for child in group.decision]
        builder.budget.remaining -= len(tokens)
        self._mover.execute(builder, moves, [beam.sequence for beam in group.beams], tokens)
        group.decision = None

    def _free_blocks_for(self, builder: PlanBuilder, group: RunningSearch) -> None:
        """Preempts a sequence so that `group` can continue in a later step; if no other sequence runs and no blocks
        are about to be released, finishes the search with an error."""
        state = self._state
        builder.short_of_blocks = True
        has_others = any(
            self._groups.root_of(int(key)) is not group.root for key in state.running.keys[state.running.live]
        )
        if has_others or state.kv.num_fenced:
            preempt_for_blocks(state, builder)
        else:
            state.finish(group.root, Reason.ERROR, failure=TOO_FEW_BLOCKS)

    def skip_idle_beams(self, builder: PlanBuilder) -> None:
        """Excludes beams from this step that have one token to compute but are not scheduled."""
        running = self._state.running
        for group in self._groups:
            for beam in group.beams:
                if running.num_computed[beam.slot] == running.num_tokens[beam.slot] - 1 and not builder.has_chunk(
                    beam.slot
                ):
                    builder.skip(beam.slot)

    def apply(self, keys: Keys, rows: DraftedRows) -> None:
        """Applies the `rows` that a step returned for the beams with these keys. A search decides once every beam of it
        has its candidates."""
        if rows.logprobs is None:
            return
        per_row = rows.logprobs.split([1] * len(rows.logprobs.ranks))
        touched: dict[int, RunningSearch] = {}
        for key, entries in zip(keys[rows.asks_logprobs].tolist(), per_row, strict=True):
            search_and_beam = self._groups.find(key)
            if search_and_beam is not None:
                group, beam = search_and_beam
                beam.candidates = BeamCandidates(entries.token_ids[1:], entries.logprobs[1:])
                touched[group.root.key] = group
        for group in touched.values():
            if all(beam.candidates is not None for beam in group.beams):
                self._decide(group)

    def _decide(self, group: RunningSearch) -> None:
        """Advances the search by the candidates of its beams: stores the children as its decision for the next step,
        or finishes the search."""
        children = group.search.advance([beam.candidates for beam in group.beams if beam.candidates is not None])
        if children:
            group.decision = children
        else:
            self._finish(group)

    def _finish(self, group: RunningSearch) -> None:
        """Emits the best sequences, each with all of its tokens in one event, then their terminal events, and
        releases the search. Outputs for which there is no result finish with an error."""
        state, root = self._state, group.root
        results = group.search.results
        sequence_ids = [output.sequence_id for output in root.outputs[: len(results)]]
        if results:
            state.events.tokens.append(_columns(root, sequence_ids, [hypothesis.node.path() for hypothesis in results]))
        state.counts.generated_tokens += sum(hypothesis.node.length for hypothesis in results)
        state.release(root, Reason.STOP)
        for output, hypothesis in zip(root.outputs, results, strict=False):
            stop = root.stop_token_id(hypothesis.node.token) if hypothesis.reason is Reason.STOP else None
            state.events.finished.append(SequenceFinished(output, hypothesis.reason, stop, score=hypothesis.score))
        for output in root.outputs[len(results) :]:
            state.events.finished.append(SequenceFinished(output, Reason.ERROR, failure=TOO_FEW_RESULTS))


def _columns(root: Sequence, sequence_ids: list[int], paths: list[list[BeamNode]]) -> TokenColumns:
    """Returns all tokens of the result sequences, one path of nodes each, in the form sent to frontends; with the
    log-probabilities of `root.num_logprobs` candidates per token if the request asked for them."""
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
    max_logprobs = root.num_logprobs
    of_positions = np.repeat(np.arange(len(sequence_ids)), lengths)
    entries = Logprobs(
        np.array([1 + len(node.candidates.token_ids[:max_logprobs]) for node in nodes], dtype=np.uint32),
        np.concatenate([[node.token, *node.candidates.token_ids[:max_logprobs]] for node in nodes]).astype(np.int32),
        np.concatenate([[node.logprob, *node.candidates.logprobs[:max_logprobs]] for node in nodes]).astype(np.float32),
        np.array([node.rank for node in nodes], dtype=np.uint32),
    )
    logprobs = LogprobColumns(columns.owners[of_positions], columns.sequence_ids[of_positions], entries)
    return TokenColumns(columns.owners, columns.sequence_ids, columns.token_ids, lengths, logprobs)
