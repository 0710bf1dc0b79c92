"""grammar: drafts the tokens that a sequence's grammar forces (jump-forward).

Such drafts are always accepted, so that they take precedence over any other method's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.sampling.features.grammar_masks import GrammarMasks
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer, Proposer
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


class GrammarDrafts:
    """Drafting method without weights that drafts nothing but forced tokens, which JumpForward proposes for every
    method."""

    block_bytes = 0
    needs_features = False
    needs_prompts = False

    def __init__(self, config: SpeculativeConfig, target: DraftTarget) -> None:
        """Ignores both arguments: the method has no parameters and needs no model."""

    def start(self, worker: DrafterWorker) -> Proposer:
        return NoDrafts()


class NoDrafts(HostProposer):
    """Proposer that proposes nothing: sequences without a grammar get no drafts."""

    def propose(self, request: DraftRequest) -> Drafts | None:
        return None


class JumpForward:
    """Proposer that proposes the tokens that a slot's grammar forces, and another proposer's drafts for the remaining
    slots; all else is passed on to that one."""

    def __init__(self, masks: GrammarMasks, other: Proposer) -> None:
        self._masks = masks
        self._other = other
        masks.collect_forced = True

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Returns the forced tokens of slots that have some, up to their maximum, and the other proposer's drafts for
        the rest; waits for the grammar masks' thread."""
        forced = self._masks.forced_tokens(request.slots)
        if not forced:
            return self._other.propose(request)
        max_counts = dict(zip(request.slots.tolist(), request.counts.tolist(), strict=True))
        drafts = None
        chains = {slot: np.array(tokens[: max_counts[slot]], dtype=np.int32) for slot, tokens in forced.items()}
        free = np.array([slot not in forced for slot in request.slots.tolist()])
        if free.any():
            drafts = self._other.propose(DraftRequest(request.slots[free], request.counts[free], request.history))
            chains |= {} if drafts is None else _by_slot(drafts)
        return Drafts.of(chains) if drafts is None or drafts.parents is None else _with_trees(chains, drafts)

    def add_blocks(self, new: NewBlocks) -> None:
        self._other.add_blocks(new)

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._other.copy_blocks(copies)

    def start_sequence(self, slot: int) -> None:
        self._other.start_sequence(slot)

    def end_sequence(self, slot: int) -> None:
        self._other.end_sequence(slot)

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        self._other.record_step(inputs, output)

    def clear_history(self) -> None:
        self._other.clear_history()


def _by_slot(drafts: Drafts) -> dict[int, I32]:
    """Splits chains of drafts into token ids by slot."""
    parts = np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])
    return dict(zip(drafts.slots.tolist(), parts, strict=True))


def _with_trees(chains: dict[int, I32], trees: Drafts) -> Drafts | None:
    """Merges chains and trees into trees: a chain becomes a tree whose nodes have one child. `chains` also contains the
    trees' tokens by slot."""
    assert trees.parents is not None
    drafts = Drafts.of(chains)
    if drafts is None:
        return None
    within = np.arange(len(drafts.token_ids)) - np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
    parents = within.astype(np.int32) - 1
    parents[np.repeat(np.isin(drafts.slots, trees.slots), drafts.counts)] = trees.parents
    return replace(drafts, parents=parents)
