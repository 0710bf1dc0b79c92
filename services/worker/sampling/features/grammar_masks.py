"""The grammar mask: a sampling feature that bans what a sequence's grammar does not allow next.

Masks are made on the host beside whatever the device and the device's thread do then, which is the next step's forward
pass. That step's sampling waits for them: on CUDA its stream does, so that steps are launched ahead of their masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels import Ops
from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.part import VocabPart
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.constrained import Constrained
from quire.services.worker.structured.mask_maker import MaskedStep, MaskMaker, Tokens
from quire.services.worker.structured.slow_grammars import SlowGrammars
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import FailedPrecondition

ANY_TOKEN = -1  # all bits of a word


class GrammarMasks:
    """Sequences under a grammar, by slot."""

    def __init__(
        self, num_slots: int, part: VocabPart, grammars: CompilePool | None, ops: Ops, device: torch.device
    ) -> None:
        self._num_slots = num_slots
        self._grammars = grammars
        self.ops = ops
        self.device = device
        self.part = part
        self.slots: dict[int, Constrained] = {}
        self._maker: MaskMaker | None = None
        self._new: dict[int, tuple[Constrained, list[int]]] = {}  # by slot, with the output so far: since begin()
        self._slow = SlowGrammars()
        self.finds_forced = False  # forced() will be called

    @property
    def maker(self) -> MaskMaker:
        """There once it is needed, and a new one in place of one that hangs."""
        if self._maker is None or self._maker.hangs:
            assert self._grammars is not None
            self._maker = MaskMaker(self._num_slots, self.part.vocab_size, self._grammars, self.device)
        return self._maker

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        if not admission.grammar_id:
            return
        self._slow.check(admission.grammar_id)
        grammar = self._grammars.grammar(admission.grammar_id) if self._grammars else None
        if grammar is None:
            raise FailedPrecondition(f"grammar {admission.grammar_id.hex()} has not been prepared")
        sequence = self.slots[slot] = Constrained(slot, grammar.start(), admission, self.part.vocab_size)
        self._new[slot] = sequence, columns.i32(admission.token_ids)[admission.num_prompt_tokens :].tolist()

    def release(self, slot: int) -> None:
        sequence = self.slots.pop(slot, None)
        self._new.pop(slot, None)
        if sequence is not None and sequence.was_too_slow:
            self._slow.add(sequence.grammar_id)

    def begin(self) -> None:
        """The first masks of all that have been admitted, together."""
        if not self._new:
            return
        admitted, self._new = [*self._new.values()], {}
        takers = [sequence for sequence, output in admitted for _ in output]
        tokens = [token for _, output in admitted for token in output]
        self._follow(takers, lambda: tokens, [sequence for sequence, _ in admitted])

    def bind(self, slots: Rows) -> BoundGrammarMasks | None:
        if not self.slots:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self.slots]
        return BoundGrammarMasks(self, np.array(rows), slots) if rows else None

    def forced(self, slots: Rows) -> dict[int, list[int]]:
        """By slot: tokens that must come next. Only where `finds_forced` is set."""
        if not self.slots:
            return {}
        self.begin()
        self.maker.wait_for_tokens()
        found = {slot: self.slots[slot].forced for slot in slots.tolist() if slot in self.slots}
        return {slot: tokens for slot, tokens in found.items() if tokens}

    def follow(self, sequences: Sequence[Constrained], token_ids: Tensor) -> None:
        """These sequences got `token_ids`, one each, in order: their next masks are made, meanwhile."""
        self._follow(sequences, download(token_ids), list(dict.fromkeys(sequences)))

    def _follow(self, takers: Sequence[Constrained], tokens: Tokens, sequences: Sequence[Constrained]) -> None:
        self.maker.follow(takers, tokens, sequences, find_forced=self.finds_forced)


class BoundGrammarMasks:
    """The masks of some rows."""

    def __init__(self, owner: GrammarMasks, rows: Rows, slots: Rows) -> None:
        self._owner = owner
        self._rows = rows
        self._slots = slots[rows]
        self._sequences = [owner.slots[slot] for slot in self._slots.tolist()]
        self._device_rows = None if len(rows) == len(slots) else upload(rows, owner.device)
        self._device_slots = upload(self._slots, owner.device)
        self._span = slice(int(self._slots[0]), int(self._slots[-1]) + 1)
        self.step: MaskedStep | None = None  # the last one

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Behind features that may have banned the end, or with drafts: waits for the masks."""
        self._owner.begin()
        owner, maker = self._owner, self._owner.maker
        maker.wait()
        self.step = maker.step_of(self._sequences)
        must_end = [sequence.must_end for sequence in self._sequences]
        if positions.drafts is None:
            self._ban(logits, maker)
        else:
            masks = maker.gather(self._slots)
            self._look_ahead(masks.numpy(), positions.drafts[self._rows].tolist(), must_end)
            owner.ops.mask_logits(logits, self._device_rows, masks, None, owner.part.first)
        each = zip(self._rows.tolist(), self._sequences, must_end, strict=True)
        ends = [(row, sequence.eos_ids[0] - owner.part.first) for row, sequence, must in each if must]
        ends = [(row, place) for row, place in ends if 0 <= place < owner.part.count]
        if ends:  # whatever min_tokens says
            rows, places = zip(*ends, strict=True)
            place = upload(rows, owner.device), upload(places, owner.device)
            logits[place] = logits[place].nan_to_num(nan=float("nan"), neginf=0.0)

    def apply_alone(self, logits: Tensor) -> None:
        """Where no other feature is used and nothing is drafted. In logits of 16 bits, too, if the choice is made from
        such. On CUDA this does not wait."""
        self._owner.begin()
        maker = self._owner.maker
        self.step = maker.step_of(self._sequences)
        self._ban(logits, maker)

    def sampled(self, token_ids: Tensor) -> None:
        mine = token_ids if self._device_rows is None else token_ids[self._device_rows]
        self._owner.follow(self._sequences, mine)

    def _ban(self, logits: Tensor, maker: MaskMaker) -> None:
        """The masks stay as they are until this step's tokens have been seen."""
        masks, first = maker.masks_at(self._span), self._owner.part.first
        self._owner.ops.mask_logits(logits, self._device_rows, masks, self._device_slots, first)

    def _look_ahead(self, masks: I32, drafts: list[list[int]], must_end: list[bool]) -> None:
        """Rows behind drafts get the masks that hold if these are right; behind one that cannot be, any token will do:
        the row is refused."""
        for row, ahead in enumerate(drafts):
            sequence = self._sequences[row]
            taken = [token for token in ahead if token >= 0]
            if not taken or not sequence.live:
                continue
            here = sequence.must_end
            if sequence.goes_on_by(taken):
                self._owner.maker.fill([sequence], [row], masks)
                sequence.matcher.rollback(len(taken))
            else:
                masks[row] = ANY_TOKEN
            must_end[row], sequence.must_end = sequence.must_end, here


def download(token_ids: Tensor) -> Tokens:
    """To the host, without waiting for it here."""
    if token_ids.device.type == "cpu":
        found = token_ids.tolist()
        return lambda: found
    host = torch.empty_like(token_ids, device="cpu", pin_memory=True).copy_(token_ids, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()

    def wait() -> Sequence[int]:
        arrived.synchronize()
        ids: list[int] = host.tolist()
        return ids

    return wait
