"""Masks are made by a thread of its own, from the moment the tokens that they follow are on the host."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.host.background import Background
from quire.services.worker.step.slots import Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.constrained import MASK_BITS, Constrained
from quire.services.worker.structured.fair_filler import FairFiller
from quire.services.worker.structured.stream_gate import StreamGate
from quire.shared.columns import I32
from quire.shared.errors import Internal, QuireError

PATIENCE_S = 5.0  # with masks that the library has been given, each of which is bounded far below that
NUM_TURNS = 10  # that it is waited in: a process that is stopped and continued loses one, however long that took
Tokens = Callable[[], Sequence[int]]  # waits until they are on the host


class MaskMaker:
    """Owns the thread, the masks by slot, and the library's own threads. One that hangs is left behind as a whole."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: CompilePool, device: torch.device) -> None:
        for_cuda = torch.device(device).type == "cuda"
        self._grammars = grammars
        self._filler = FairFiller(grammars.backend.filler())
        self._thread = Background("masks")
        self._for_cuda = for_cuda
        self._num_words = -(-vocab_size // MASK_BITS)
        self._memory = self._room(num_slots)  # [num_slots, num_words]
        self._masks: I32 = self._memory.numpy()
        self._on_device = torch.zeros_like(self._memory, device=device) if for_cuda else self._memory
        self._staged: Tensor | None = None  # where masks of drafted rows are put together
        self._gate = StreamGate() if for_cuda else None
        self._count = 0
        self._taken: Future[None] | None = None
        self._made: Future[None] | None = None
        self._awaited: Future[None] | None = None  # the last that was waited for here
        self._busy_since: float | None = None
        self.hangs = False
        if for_cuda:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="masks' watch", daemon=True).start()

    def follow(
        self, takers: Sequence[Constrained], tokens: Tokens, sequences: Sequence[Constrained], *, find_forced: bool
    ) -> None:
        """`takers` take the tokens, one each; `sequences`, those among them, each once, get their next masks."""
        self._count += 1
        number = self._count
        taken = self._thread.submit(lambda: self._take(takers, tokens, sequences, find_forced))
        self._made = self._thread.submit(lambda: self._make(number, taken, sequences))
        self._taken = taken

    def wait_for_tokens(self) -> None:
        """Until all have been taken."""
        if self._taken is not None:
            wait(self._taken, self)

    def wait(self) -> None:
        """Until all masks are made."""
        made = self._made
        if made is not None and made is not self._awaited:
            self._awaited = made
            began = time.perf_counter()
            wait(made, self)
            self._grammars.observer.masks_awaited(time.perf_counter() - began)

    def masks_at(self, slots: slice) -> Tensor:
        """[num_slots, num_words] for what is launched from now on, right at `slots` once the masks are made: waits for
        them, and on CUDA lets the device wait."""
        if self._gate is None:
            self.wait()
        else:
            self._gate.copy_at(self._count, self._on_device[slots], self._memory[slots])
        return self._on_device

    def step_of(self, sequences: Sequence[Constrained]) -> MaskedStep | None:
        """One that waits for all masks so far."""
        return None if self._made is None else MaskedStep(self, self._made, self._count, sequences)

    def give_up(self) -> None:
        """Any thread may."""
        self.hangs = True
        if self._gate is not None:
            self._gate.open_for_good()

    @property
    def busy_since(self) -> float | None:
        return self._busy_since

    def fill(self, sequences: Sequence[Constrained], places: Sequence[int], masks: I32) -> None:
        """When all masks are made, or on their thread."""
        live = [(sequence, place) for sequence, place in zip(sequences, places, strict=True) if sequence.live]
        if live:
            self._filler.fill([sequence for sequence, _ in live], [place for _, place in live], masks)
        for sequence, place in zip(sequences, places, strict=True):
            sequence.permit_end(masks[place])

    def gather(self, slots: Rows) -> Tensor:
        """The masks of these slots, to be changed. Steps before this one are done with the pinned memory: their tokens
        have been seen."""
        if self._staged is None or len(self._staged) < len(slots):  # rows behind drafts have masks of their own
            self._staged = self._room(2 * len(slots))
        staged = self._staged[: len(slots)]
        # No torch here: threads of its pool that had copied would go on spinning, at the cost of those that fill masks.
        np.take(self._masks, slots, axis=0, out=staged.numpy(), mode="clip")
        return staged

    def _room(self, num_masks: int) -> Tensor:
        """What no grammar has filled allows nothing."""
        return torch.zeros((num_masks, self._num_words), dtype=torch.int32, pin_memory=self._for_cuda)

    # On the masks' thread

    def _take(
        self, takers: Sequence[Constrained], tokens: Tokens, sequences: Sequence[Constrained], find_forced: bool
    ) -> None:
        token_ids = tokens()
        self._busy_since = time.perf_counter()
        taken = [*zip(takers, token_ids, strict=True)]
        together: list[tuple[Constrained, int]] = []
        if len(taken) > 1 and [*takers] == [*sequences]:  # a token each
            together = [each for each in taken if not each[0].takes_long]
            taken = [each for each in taken if each[0].takes_long]
        self._take_together(together)
        for sequence, token_id in taken:
            sequence.take(token_id)
        if find_forced:
            for sequence in sequences:
                sequence.forced = sequence.matcher.forced() if sequence.live else []

    def _take_together(self, taken: Sequence[tuple[Constrained, int]]) -> None:
        moving = [(sequence, token_id) for sequence, token_id in taken if sequence.moves_by(token_id)]
        if not moving:
            return
        accepted = self._filler.accept([sequence for sequence, _ in moving], [token_id for _, token_id in moving])
        for (sequence, token_id), is_right in zip(moving, accepted, strict=True):
            if not is_right:
                sequence.refuse(token_id)

    def _make(self, number: int, taken: Future[None], sequences: Sequence[Constrained]) -> None:
        try:
            taken.result()  # raises what went wrong there
            began = time.perf_counter()
            self.fill(sequences, [sequence.slot for sequence in sequences], self._masks)
            self._grammars.observer.masks_filled(time.perf_counter() - began)
            for sequence in sequences:
                if sequence.error is not None and sequence.failed_at is None:
                    sequence.failed_at = number
        finally:
            self._busy_since = None
            if self._gate is not None:
                self._gate.reach(number)


@dataclass(frozen=True, slots=True)
class MaskedStep:
    """A step whose sampling waits for masks, or has waited."""

    _maker: MaskMaker
    _masks: Future[None]
    _number: int
    _sequences: Sequence[Constrained]

    def faults(self) -> dict[int, QuireError]:
        """Sequences that cannot go on, by slot. Any thread may ask, and waits for the masks."""
        wait(self._masks, self._maker)
        return {
            sequence.slot: sequence.error
            for sequence in self._sequences
            if sequence.error is not None and sequence.failed_at is not None and sequence.failed_at <= self._number
        }


def wait(job: Future[None], maker: MaskMaker) -> None:
    """A thread that hangs in the library is left to itself, with the memory that it may still write to."""
    for _ in range(NUM_TURNS):
        with contextlib.suppress(TimeoutError):
            job.exception(PATIENCE_S / NUM_TURNS)
            break
    else:
        maker.give_up()
        raise Internal(f"masks were not made within {PATIENCE_S:.0f} s")
    job.result()


def _watch(maker_ref: weakref.ref[MaskMaker]) -> None:
    """While a stream waits, the thread that launches may have to wait as well, to load a kernel for instance, and then
    no thread is left to notice that the masks' thread hangs."""
    seen, num_turns = None, 0
    while (maker := maker_ref()) is not None and not maker.hangs:
        num_turns = num_turns + 1 if maker.busy_since is not None and maker.busy_since == seen else 0
        seen = maker.busy_since
        if num_turns > NUM_TURNS:
            maker.give_up()
        del maker
        time.sleep(PATIENCE_S / NUM_TURNS)
