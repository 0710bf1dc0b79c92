"""The grammar mask: a sampling feature that bans what a sequence's grammar does not allow next.

Masks are made on the host by a thread of their own, from the moment a step's tokens are there: beside whatever the
device and the device's thread do then, which is the next step's forward pass. That step's sampling waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from kernels import Ops
from services.worker.sampling.component import Positions, Tensor, upload
from services.worker.slots import Rows
from services.worker.structured.background import Background
from services.worker.structured.compile_pool import CompilePool, MaskObserver
from services.worker.structured.fair_filler import SLOW_TOKEN_S, FairFiller, Pace
from services.worker.structured.port import Matcher
from shared import columns
from shared.columns import I32
from shared.errors import FailedPrecondition, Internal, InvalidArgument, QuireError
from shared.pb.worker.v1 import worker_pb2 as pb

MASK_BITS = 32
ANY_TOKEN = -1  # all bits of a word
PATIENCE_S = 5.0  # with masks that the library has been given, each of which is bounded far below that
Tokens = Callable[[], Sequence[int]]  # waits until they are on the host


class Constrained:
    """A sequence under a grammar."""

    def __init__(self, slot: int, matcher: Matcher, admission: pb.Admission, vocab_size: int) -> None:
        self.slot = slot
        self.matcher = matcher
        self.eos_ids = [i for i in columns.u32(admission.eos_token_ids).tolist() if i < vocab_size]
        self.may_end_early = not admission.sampling.ignore_eos
        self.ended = False
        self.must_end = False  # the grammar allows nothing more
        self.error: QuireError | None = None
        self._pace = Pace()
        self.forced: list[int] = []  # tokens that must come next
        self.takes_long = False
        self.watched = False
        self.num_slow = 0

    @property
    def live(self) -> bool:
        return not self.ended and self.error is None

    def take(self, token_id: int) -> None:
        """A token that was sampled; negative: none was."""
        if not self.moves_by(token_id):
            return
        if not self._accepts(token_id):
            self.refuse(token_id)
        elif self._pace.is_slow:
            self.fail(f"the grammar is too slow: {self._pace}")

    def moves_by(self, token_id: int) -> bool:
        """Whether its matcher has to take the token: it is no end, and the sequence has not ended."""
        if token_id < 0 or not self.live:
            return False
        self.ended = token_id in self.eos_ids
        return not self.ended

    def refuse(self, token_id: int) -> None:
        self.fail(f"the grammar does not allow token {token_id}, which the output holds")

    def _accepts(self, token_id: int) -> bool:
        began = time.thread_time()
        accepted = self.matcher.accept([token_id])
        seconds = time.thread_time() - began
        self.takes_long = seconds > SLOW_TOKEN_S
        self._pace.add(seconds)
        return accepted == 1

    def goes_on_by(self, token_ids: Sequence[int]) -> bool:
        """Takes all of these tokens, or none where the grammar does not allow them all."""
        if any(token_id in self.eos_ids for token_id in token_ids):
            return False
        taken = self.matcher.accept(token_ids)
        if taken < len(token_ids):
            self.matcher.rollback(taken)
        return taken == len(token_ids)

    def permit_end(self, mask: I32) -> None:
        """Completes a mask just filled by what ends the sequence: the request says which tokens do."""
        fault = self.matcher.fault if self.live else ""
        if fault:
            self.fail(f"the grammar became too complex: {' '.join(fault.split())[:200]}")
        if not self.live:
            mask[:] = 0
        elif not self.matcher.can_end:
            return
        self.must_end = not mask.any()
        if self.must_end or self.may_end_early:
            for token_id in self.eos_ids:
                mask[token_id // MASK_BITS] |= bit(token_id)

    def fail(self, text: str) -> None:
        self.error = InvalidArgument(f"structured_output: {text}", field="structured_output")


class GrammarMasks:
    """Matchers and masks by slot."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: CompilePool | None, ops: Ops, device: Any) -> None:
        self._shape = num_slots, -(-vocab_size // MASK_BITS)
        self._grammars = grammars
        self.ops = ops
        self.device = device
        self.vocab_size = vocab_size
        self.slots: dict[int, Constrained] = {}
        self._is_cuda = torch.device(device).type == "cuda"
        self.memory: Tensor = torch.zeros((0, 0), dtype=torch.int32)  # [num_slots, num_words] once there is any
        self._staged: Tensor | None = None  # for CUDA: where masks of drafted rows are put together
        self._faults: dict[int, QuireError] = {}  # by slot: found out since they were last asked for
        self._thread: Background | None = None
        self._filler: FairFiller | None = None
        self._followed: Future[None] | None = None
        self._last: Future[None] | None = None
        self.finds_forced = False  # somebody asks for forced()

    def admit(self, slot: int, admission: pb.Admission) -> None:
        if not admission.grammar_id:
            return
        grammar = self._grammars.grammar(admission.grammar_id) if self._grammars else None
        if grammar is None:
            raise FailedPrecondition(f"grammar {admission.grammar_id.hex()} has not been prepared")
        self._make_room()
        sequence = self.slots[slot] = Constrained(slot, grammar.start(), admission, self.vocab_size)
        output = columns.i32(admission.token_ids)[admission.num_prompt_tokens :].tolist()
        self._follow([sequence] * len(output), lambda: output, [sequence])

    def release(self, slot: int) -> None:
        self.slots.pop(slot, None)
        self._faults.pop(slot, None)

    def bind(self, slots: Rows) -> BoundGrammarMasks | None:
        if not self.slots:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self.slots]
        return BoundGrammarMasks(self, np.array(rows), slots) if rows else None

    def forced(self, slots: Rows) -> dict[int, list[int]]:
        """By slot: tokens that must come next. For whoever has set `finds_forced`."""
        if not self.slots:
            return {}
        if self._followed is not None:
            self._wait_for(self._followed)
        found = {slot: self.slots[slot].forced for slot in slots.tolist() if slot in self.slots}
        return {slot: tokens for slot, tokens in found.items() if tokens}

    def take_faults(self) -> dict[int, QuireError]:
        """Sequences that cannot go on, by slot."""
        found, self._faults = self._faults, {}
        return found

    # For bound rows.

    def follow(self, sequences: Sequence[Constrained], token_ids: Tensor) -> None:
        """These sequences got `token_ids`, one each, in order: their next masks are made, meanwhile."""
        self._follow(sequences, download(token_ids), list(dict.fromkeys(sequences)))

    def settle(self, sequences: Sequence[Constrained]) -> None:
        """Until the masks of all are made."""
        if self._last is not None:
            began = time.perf_counter()
            self._wait_for(self._last)
            self._observe().masks_awaited(time.perf_counter() - began)
            if self._followed is not None:
                self._followed.result()  # raises what went wrong there
            self._last = self._followed = None
        for sequence in sequences:
            if sequence.error is not None:
                self._faults[sequence.slot] = sequence.error

    def fill(self, sequences: Sequence[Constrained], places: Sequence[int], masks: I32) -> None:
        """Only with settled masks, or on their thread."""
        live = [(sequence, place) for sequence, place in zip(sequences, places, strict=True) if sequence.live]
        if live:
            self._open_filler().fill([sequence for sequence, _ in live], [place for _, place in live], masks)
        for sequence, place in zip(sequences, places, strict=True):
            sequence.permit_end(masks[place])

    def gather(self, slots: Rows) -> Tensor:
        """The masks of these slots, to be changed. Steps before this one are done with the pinned memory: their tokens
        have been seen."""
        if self._staged is None or len(self._staged) < len(slots):  # rows behind drafts have masks of their own
            self._staged = self._room(2 * len(slots))
        staged = self._staged[: len(slots)]
        # No torch here: threads of its pool that had copied would go on spinning, at the cost of those that fill masks.
        np.take(self.memory.numpy(), slots, axis=0, out=staged.numpy(), mode="clip")
        return staged

    def _room(self, num_masks: int) -> Tensor:
        """Where a device reads from the host: what no grammar has filled allows nothing."""
        return torch.zeros((num_masks, self._shape[1]), dtype=torch.int32, pin_memory=self._is_cuda)

    def _make_room(self) -> None:
        if not len(self.memory):
            self.memory = self._room(self._shape[0])

    def _fill_next(self, sequences: Sequence[Constrained], masks: I32) -> None:
        """On the masks' thread."""
        began = time.perf_counter()
        self.fill(sequences, [sequence.slot for sequence in sequences], masks)
        self._observe().masks_filled(time.perf_counter() - began)

    def _observe(self) -> MaskObserver:
        assert self._grammars is not None
        return self._grammars.observer

    def _post(self, job: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = Background("masks")
        return self._thread.submit(job)

    def _open_filler(self) -> FairFiller:
        if self._filler is None:
            assert self._grammars is not None
            self._filler = FairFiller(self._grammars.backend.filler())
        return self._filler

    def _wait_for(self, masks: Future[None]) -> None:
        """A thread that hangs in the library is left to itself, with the memory that it may still write to."""
        try:
            masks.result(timeout=PATIENCE_S)
        except TimeoutError:
            self._thread = self._filler = self._followed = self._last = None
            self.memory = self._room(self._shape[0])
            raise Internal(f"masks were not made within {PATIENCE_S:.0f} s") from None

    def _follow(self, takers: Sequence[Constrained], tokens: Tokens, sequences: Sequence[Constrained]) -> None:
        """`takers` take the tokens, one each; `sequences` are those among them, each once."""
        masks: I32 = self.memory.numpy()
        self._followed = self._post(lambda: self._advance(takers, tokens, sequences))
        self._last = self._post(lambda: self._fill_next(sequences, masks))

    def _advance(self, takers: Sequence[Constrained], tokens: Tokens, sequences: Sequence[Constrained]) -> None:
        """On the masks' thread."""
        taken = [*zip(takers, tokens(), strict=True)]
        together: list[tuple[Constrained, int]] = []
        if len(taken) == len(sequences) > 1:  # a token each
            together = [each for each in taken if not each[0].takes_long]
            taken = [each for each in taken if each[0].takes_long]
        self._take_together(together)
        for sequence, token_id in taken:
            sequence.take(token_id)
        if self.finds_forced:
            for sequence in sequences:
                sequence.forced = sequence.matcher.forced() if sequence.live else []

    def _take_together(self, taken: Sequence[tuple[Constrained, int]]) -> None:
        moving = [(sequence, token_id) for sequence, token_id in taken if sequence.moves_by(token_id)]
        if not moving:
            return
        accepted = self._open_filler().accept(
            [sequence for sequence, _ in moving], [token_id for _, token_id in moving]
        )
        for (sequence, token_id), is_right in zip(moving, accepted, strict=True):
            if not is_right:
                sequence.refuse(token_id)


class BoundGrammarMasks:
    """The masks of some rows."""

    def __init__(self, owner: GrammarMasks, rows: Rows, slots: Rows) -> None:
        self._owner = owner
        self._rows = rows
        self._slots = slots[rows]
        self._sequences = [owner.slots[slot] for slot in self._slots.tolist()]
        self._device_rows = None if len(rows) == len(slots) else upload(rows, owner.device)
        self._device_slots = upload(self._slots, owner.device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        self.ban(logits, positions.drafts)

    def ban(self, logits: Tensor, drafts: Tensor | None = None) -> None:
        """In logits of 16 bits, too, where the choice is made from such."""
        owner = self._owner
        owner.settle(self._sequences)
        must_end = [sequence.must_end for sequence in self._sequences]
        if drafts is None:
            # Read where the thread fills them, which will not go on before it has seen this step's tokens.
            owner.ops.mask_logits(logits, self._device_rows, owner.memory, self._device_slots)
        else:
            masks = owner.gather(self._slots)
            self._look_ahead(masks.numpy(), drafts[self._rows].tolist(), must_end)
            owner.ops.mask_logits(logits, self._device_rows, masks)
        each = zip(self._rows.tolist(), self._sequences, must_end, strict=True)
        ends = [(row, sequence.eos_ids[0]) for row, sequence, must in each if must]
        if ends:  # whatever min_tokens says
            rows, ids = zip(*ends, strict=True)
            place = upload(rows, owner.device), upload(ids, owner.device)
            logits[place] = logits[place].nan_to_num(nan=float("nan"), neginf=0.0)

    def sampled(self, token_ids: Tensor) -> None:
        mine = token_ids if self._device_rows is None else token_ids[self._device_rows]
        self._owner.follow(self._sequences, mine)

    def _look_ahead(self, masks: I32, drafts: list[list[int]], must_end: list[bool]) -> None:
        """Rows behind drafts get the masks that hold if these are right; behind one that cannot be, any token will do:
        nobody will see it."""
        for row, ahead in enumerate(drafts):
            sequence = self._sequences[row]
            taken = [token for token in ahead if token >= 0]
            if not taken or not sequence.live:
                continue
            here = sequence.must_end
            if sequence.goes_on_by(taken):
                self._owner.fill([sequence], [row], masks)
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


def bit(token_id: int) -> np.int32:
    """Of a token in its word."""
    return np.uint32(1 << token_id % MASK_BITS).view(np.int32)
