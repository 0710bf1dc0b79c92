"""Grammar masks: a sampling feature that bans the tokens that a sequence's grammar does not allow next.

A thread of the host builds the masks of a step while the device runs the next forward pass. That step's sampling waits
for them; on CUDA the stream waits, so that steps are launched before their masks exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels import Ops
from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.constrained_sequence import ConstrainedSequence
from quire.services.worker.structured.mask_builder import MaskBuilder, StepMasks, TokenSource
from quire.services.worker.structured.slow_grammars import SlowGrammars
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import FailedPrecondition

ANY_TOKEN = -1  # all bits of a word


class GrammarMasks:
    """Sampling feature that owns the sequences under a grammar by slot, and the builder of their masks."""

    parameters = frozenset({"grammar_id"})

    def __init__(
        self, num_slots: int, shard: VocabShard, grammars: CompilePool | None, ops: Ops, device: torch.device
    ) -> None:
        self._num_slots = num_slots
        self._grammars = grammars
        self.ops = ops
        self.device = device
        self.shard = shard
        self.slots: dict[int, ConstrainedSequence] = {}
        self._builder: MaskBuilder | None = None
        # Sequences admitted since the last build_first_masks(), with their output so far, by slot.
        self.admitted: dict[int, tuple[ConstrainedSequence, list[int]]] = {}
        self._slow = SlowGrammars()
        self.collect_forced = False  # whether forced_tokens() will be called

    @property
    def builder(self) -> MaskBuilder:
        """The mask builder with its thread, created on first use and replaced by a new one if it hangs."""
        if self._builder is None or self._builder.is_hung:
            assert self._grammars is not None
            self._builder = MaskBuilder(self._num_slots, self.shard.vocab_size, self._grammars, self.device)
        return self._builder

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Starts a matcher for the admission's grammar and queues the output so far, which build_first_masks() advances
        it by; does nothing without a grammar. Raises FailedPrecondition if the grammar was not prepared,
        InvalidArgument if sequences under it were too slow too often."""
        if not admission.grammar_id:
            return
        self._slow.check(admission.grammar_id)
        grammar = self._grammars.grammar(admission.grammar_id) if self._grammars else None
        if grammar is None:
            raise FailedPrecondition(f"grammar {admission.grammar_id.hex()} has not been prepared")
        sequence = self.slots[slot] = ConstrainedSequence(slot, grammar.new_matcher(), admission, self.shard.vocab_size)
        self.admitted[slot] = sequence, columns.i32(admission.token_ids)[admission.num_prompt_tokens :].tolist()

    def release(self, slot: int) -> None:
        """Drops the slot's sequence, if any; one that was ended as too slow counts against its grammar, which is
        refused after a few of them."""
        sequence = self.slots.pop(slot, None)
        self.admitted.pop(slot, None)
        if sequence is not None and sequence.was_too_slow:
            self._slow.record_ended(sequence.grammar_id)

    def build_first_masks(self) -> None:
        """Starts building the first masks of all sequences admitted since the last call, after advancing each by the
        output that it already has. Returns at once; does nothing if there are none."""
        if not self.admitted:
            return
        admitted, self.admitted = [*self.admitted.values()], {}
        receivers = [sequence for sequence, output in admitted for _ in output]
        tokens = [token for _, output in admitted for token in output]
        self._advance(receivers, lambda: tokens, [sequence for sequence, _ in admitted])

    def bind(self, slots: Rows) -> BoundGrammarMasks | None:
        """Prepares the rows of slots under a grammar; None if there are none."""
        if not self.slots:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self.slots]
        return BoundGrammarMasks(self, np.array(rows), slots) if rows else None

    def forced_tokens(self, slots: Rows) -> dict[int, list[int]]:
        """Returns by slot the tokens that the grammar forces to come next; slots with none are left out. Waits for the
        mask builder's thread; requires `collect_forced`."""
        if not self.slots:
            return {}
        self.build_first_masks()
        self.builder.wait_for_tokens()
        forced = {slot: self.slots[slot].forced_tokens for slot in slots.tolist() if slot in self.slots}
        return {slot: tokens for slot, tokens in forced.items() if tokens}

    def advance(self, sequences: Sequence[ConstrainedSequence], token_ids: Tensor) -> None:
        """Advances `sequences` by `token_ids`, one each in order (a sequence occurs once per row of its drafts), and
        starts building their next masks on the builder's thread. Does not wait for the device."""
        self._advance(sequences, download(token_ids), list(dict.fromkeys(sequences)))

    def _advance(
        self, receivers: Sequence[ConstrainedSequence], tokens: TokenSource, sequences: Sequence[ConstrainedSequence]
    ) -> None:
        """Passes tokens and sequences to the mask builder, which works on its own thread."""
        self.builder.advance(receivers, tokens, sequences, collect_forced=self.collect_forced)


class BoundGrammarMasks:
    """Grammar masks of the rows of a step whose slots have a grammar."""

    def __init__(self, owner: GrammarMasks, rows: Rows, slots: Rows) -> None:
        self._owner = owner
        self._rows = rows
        self._slots = slots[rows]
        self._sequences = [owner.slots[slot] for slot in self._slots.tolist()]
        self._device_rows = None if len(rows) == len(slots) else upload(rows, owner.device)
        self._device_slots = upload(self._slots, owner.device)
        self._span = slice(int(self._slots[0]), int(self._slots[-1]) + 1)
        self.step: StepMasks | None = None  # the masks of the last step

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Waits for the host's masks and applies them in place, used if other features or drafts are in the step: looks
        ahead over drafts, and restores the end token where the grammar allows nothing else but another feature
        (min_tokens) banned it."""
        self._owner.build_first_masks()
        owner, builder = self._owner, self._owner.builder
        builder.wait()
        self.step = builder.step_masks(self._sequences)
        must_end = [sequence.must_end for sequence in self._sequences]
        if positions.drafts is None:
            self._ban(logits, builder)
        else:
            masks = builder.gather(self._slots)
            self._look_ahead(masks.numpy(), positions.drafts[self._rows].tolist(), must_end)
            owner.ops.mask_logits(logits, self._device_rows, masks, None, owner.shard.first)
        constrained_rows = zip(self._rows.tolist(), self._sequences, must_end, strict=True)
        ends = [(row, sequence.eos_ids[0] - owner.shard.first) for row, sequence, must in constrained_rows if must]
        ends = [(row, place) for row, place in ends if 0 <= place < owner.shard.count]
        if ends:  # the grammar overrides min_tokens
            rows, places = zip(*ends, strict=True)
            place = upload(rows, owner.device), upload(places, owner.device)
            logits[place] = logits[place].nan_to_num(nan=float("nan"), neginf=0.0)

    def apply_alone(self, logits: Tensor) -> None:
        """Applies the masks in place if there are no drafts and no other feature, also to 16-bit logits. On CUDA the
        stream waits for the masks, the host does not."""
        self._owner.build_first_masks()
        builder = self._owner.builder
        self.step = builder.step_masks(self._sequences)
        self._ban(logits, builder)

    def sampled(self, token_ids: Tensor) -> None:
        """Advances the sequences by their rows' tokens and starts building the masks of the next step."""
        row_tokens = token_ids if self._device_rows is None else token_ids[self._device_rows]
        self._owner.advance(self._sequences, row_tokens)

    def _ban(self, logits: Tensor, builder: MaskBuilder) -> None:
        """Masks the logits in place with the builder's device masks, which do not change until this step's tokens have
        been read."""
        masks, first = builder.device_masks(self._span), self._owner.shard.first
        self._owner.ops.mask_logits(logits, self._device_rows, masks, self._device_slots, first)

    def _look_ahead(self, masks: I32, drafts: list[list[int]], must_end: list[bool]) -> None:
        """Fills `masks` of rows after drafts as if these were accepted, and rolls the matchers back; a row after an
        impossible draft allows every token, because it will be refused. Updates `must_end` of each such row to the
        state after its drafts."""
        for row, preceding in enumerate(drafts):
            sequence = self._sequences[row]
            draft_tokens = [token for token in preceding if token >= 0]
            if not draft_tokens or not sequence.is_live:
                continue
            must_end_now = sequence.must_end
            if sequence.try_advance(draft_tokens):
                self._owner.builder.fill([sequence], [row], masks)
                sequence.matcher.rollback(len(draft_tokens))
            else:
                masks[row] = ANY_TOKEN
            must_end[row], sequence.must_end = sequence.must_end, must_end_now


def download(token_ids: Tensor) -> TokenSource:
    """Starts copying `token_ids` to the host, on the current stream, and returns a function that waits for the copy and
    returns the ids. Does not wait itself."""
    if token_ids.device.type == "cpu":
        ids_on_host = token_ids.tolist()
        return lambda: ids_on_host
    host = torch.empty_like(token_ids, device="cpu", pin_memory=True).copy_(token_ids, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()

    def wait() -> Sequence[int]:
        """Blocks the calling thread until the copy has arrived; returns the ids."""
        arrived.synchronize()
        ids: list[int] = host.tolist()
        return ids

    return wait
