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

from quire.services.worker.host.background import BackgroundThreads
from quire.services.worker.step.slots import Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.constrained_sequence import MASK_BITS, ConstrainedSequence
from quire.services.worker.structured.fair_filler import FairFiller
from quire.services.worker.structured.stream_gate import StreamGate
from quire.shared.columns import I32
from quire.shared.errors import Internal, QuireError

MAX_WAIT_S = 5.0  # with masks that the library has been given, each of which is bounded far below that
MAX_WAIT_SLICES = 10  # that it is waited in: a process that is stopped and continued loses one, however long that took
TokenSource = Callable[[], Sequence[int]]  # waits until they are on the host


class MaskBuilder:
    """Owns the thread, the masks by slot, and the library's own threads. One that hangs is left behind as a whole."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: CompilePool, device: torch.device) -> None:
        for_cuda = torch.device(device).type == "cuda"
        self._grammars = grammars
        self._filler = FairFiller(grammars.backend.filler())
        self._thread = BackgroundThreads("masks")
        self._for_cuda = for_cuda
        self._num_words = -(-vocab_size // MASK_BITS)
        self._memory = self._allocate_masks(num_slots)  # [num_slots, num_words]
        self._masks: I32 = self._memory.numpy()
        self._on_device = torch.zeros_like(self._memory, device=device) if for_cuda else self._memory
        self._staged: Tensor | None = None  # where masks of drafted rows are put together
        self._gate = StreamGate() if for_cuda else None
        self._count = 0
        self._taken: Future[None] | None = None
        self._made: Future[None] | None = None
        self._awaited: Future[None] | None = None  # the last that was waited for here
        self._busy_since: float | None = None
        self.is_hung = False
        if for_cuda:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="masks' watch", daemon=True).start()

    def advance(
        self,
        receivers: Sequence[ConstrainedSequence],
        tokens: TokenSource,
        sequences: Sequence[ConstrainedSequence],
        *,
        collect_forced: bool,
    ) -> None:
        """`receivers` take the tokens, one each; `sequences`, those among them, each once, get their next masks."""
        self._count += 1
        number = self._count
        taken = self._thread.submit(lambda: self._advance_matchers(receivers, tokens, sequences, collect_forced))
        self._made = self._thread.submit(lambda: self._build_masks(number, taken, sequences))
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
            self._grammars.observer.observe_mask_wait(time.perf_counter() - began)

    def device_masks(self, slots: slice) -> Tensor:
        """[num_slots, num_words] for what is launched from now on, right at `slots` once the masks are made: waits for
        them, and on CUDA lets the device wait."""
        if self._gate is None:
            self.wait()
        else:
            self._gate.copy_after(self._count, self._on_device[slots], self._memory[slots])
        return self._on_device

    def step_masks(self, sequences: Sequence[ConstrainedSequence]) -> StepMasks | None:
        """One that waits for all masks so far."""
        return None if self._made is None else StepMasks(self, self._made, self._count, sequences)

    def give_up(self) -> None:
        """Any thread may."""
        self.is_hung = True
        if self._gate is not None:
            self._gate.open_permanently()

    @property
    def busy_since(self) -> float | None:
        return self._busy_since

    def fill(self, sequences: Sequence[ConstrainedSequence], places: Sequence[int], masks: I32) -> None:
        """When all masks are made, or on their thread."""
        live = [(sequence, place) for sequence, place in zip(sequences, places, strict=True) if sequence.is_live]
        if live:
            self._filler.fill([sequence for sequence, _ in live], [place for _, place in live], masks)
        for sequence, place in zip(sequences, places, strict=True):
            sequence.allow_end_tokens(masks[place])

    def gather(self, slots: Rows) -> Tensor:
        """The masks of these slots, to be changed. Steps before this one are done with the pinned memory: their tokens
        have been seen."""
        if self._staged is None or len(self._staged) < len(slots):  # rows behind drafts have masks of their own
            self._staged = self._allocate_masks(2 * len(slots))
        staged = self._staged[: len(slots)]
        # No torch here: threads of its pool that had copied would go on spinning, at the cost of those that fill masks.
        np.take(self._masks, slots, axis=0, out=staged.numpy(), mode="clip")
        return staged

    def _allocate_masks(self, num_masks: int) -> Tensor:
        """What no grammar has filled allows nothing."""
        return torch.zeros((num_masks, self._num_words), dtype=torch.int32, pin_memory=self._for_cuda)

    # On the masks' thread

    def _advance_matchers(
        self,
        receivers: Sequence[ConstrainedSequence],
        tokens: TokenSource,
        sequences: Sequence[ConstrainedSequence],
        collect_forced: bool,
    ) -> None:
        token_ids = tokens()
        self._busy_since = time.perf_counter()
        taken = [*zip(receivers, token_ids, strict=True)]
        together: list[tuple[ConstrainedSequence, int]] = []
        if len(taken) > 1 and [*receivers] == [*sequences]:  # a token each
            together = [each for each in taken if not each[0].advance_alone]
            taken = [each for each in taken if each[0].advance_alone]
        self._advance_together(together)
        for sequence, token_id in taken:
            sequence.advance(token_id)
        if collect_forced:
            for sequence in sequences:
                sequence.forced_tokens = sequence.matcher.forced_tokens() if sequence.is_live else []

    def _advance_together(self, taken: Sequence[tuple[ConstrainedSequence, int]]) -> None:
        moving = [(sequence, token_id) for sequence, token_id in taken if sequence.should_advance(token_id)]
        if not moving:
            return
        accepted = self._filler.accept([sequence for sequence, _ in moving], [token_id for _, token_id in moving])
        for (sequence, token_id), is_right in zip(moving, accepted, strict=True):
            if not is_right:
                sequence.reject_token(token_id)

    def _build_masks(self, number: int, taken: Future[None], sequences: Sequence[ConstrainedSequence]) -> None:
        try:
            taken.result()  # raises what went wrong there
            began = time.perf_counter()
            self.fill(sequences, [sequence.slot for sequence in sequences], self._masks)
            self._grammars.observer.observe_mask_fill(time.perf_counter() - began)
            for sequence in sequences:
                if sequence.error is not None and sequence.failed_mask_number is None:
                    sequence.failed_mask_number = number
        finally:
            self._busy_since = None
            if self._gate is not None:
                self._gate.advance_to(number)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """A step whose sampling waits for masks, or has waited."""

    _builder: MaskBuilder
    _masks: Future[None]
    _number: int
    _sequences: Sequence[ConstrainedSequence]

    def faults(self) -> dict[int, QuireError]:
        """Sequences that cannot go on, by slot. Any thread may ask, and waits for the masks."""
        wait(self._masks, self._builder)
        return {
            sequence.slot: sequence.error
            for sequence in self._sequences
            if sequence.error is not None
            and sequence.failed_mask_number is not None
            and sequence.failed_mask_number <= self._number
        }


def wait(job: Future[None], builder: MaskBuilder) -> None:
    """A thread that hangs in the library is left to itself, with the memory that it may still write to."""
    for _ in range(MAX_WAIT_SLICES):
        with contextlib.suppress(TimeoutError):
            job.exception(MAX_WAIT_S / MAX_WAIT_SLICES)
            break
    else:
        builder.give_up()
        raise Internal(f"masks were not made within {MAX_WAIT_S:.0f} s")
    job.result()


def _watch(builder_ref: weakref.ref[MaskBuilder]) -> None:
    """While a stream waits, the thread that launches may have to wait as well, to load a kernel for instance, and then
    no thread is left to notice that the masks' thread hangs."""
    seen, num_turns = None, 0
    while (builder := builder_ref()) is not None and not builder.is_hung:
        num_turns = num_turns + 1 if builder.busy_since is not None and builder.busy_since == seen else 0
        seen = builder.busy_since
        if num_turns > MAX_WAIT_SLICES:
            builder.give_up()
        del builder
        time.sleep(MAX_WAIT_S / MAX_WAIT_SLICES)
