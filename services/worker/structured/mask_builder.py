"""Builds masks in a background thread, as soon as the tokens that they follow are on the host."""

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

MAX_WAIT_S = 5.0  # per batch of masks, each of which has a far lower limit
MAX_WAIT_SLICES = 10  # of MAX_WAIT_S: a process that is stopped and continued loses one slice, however long it stood
TokenSource = Callable[[], Sequence[int]]  # waits until they are on the host


class MaskBuilder:
    """Owns the masks' thread, the masks by slot, int32 [num_slots, num_words], and the library's filler. If it hangs,
    it is abandoned as a whole, and its owner creates another one."""

    def __init__(self, num_slots: int, vocab_size: int, grammars: CompilePool, device: torch.device) -> None:
        """Allocates a mask of `vocab_size` bits for each slot and starts the masks' thread; on CUDA also the gate at
        which the stream waits for masks, and a watch that opens it if the thread hangs."""
        for_cuda = torch.device(device).type == "cuda"
        self._grammars = grammars
        self._filler = FairFiller(grammars.backend.filler())
        self._thread = BackgroundThreads("masks")
        self._for_cuda = for_cuda
        self._num_words = -(-vocab_size // MASK_BITS)
        self._memory = self._allocate_masks(num_slots)  # [num_slots, num_words]
        self._masks: I32 = self._memory.numpy()
        self._on_device = torch.zeros_like(self._memory, device=device) if for_cuda else self._memory
        self._staged: Tensor | None = None  # gathered masks of rows with drafts
        self._gate = StreamGate() if for_cuda else None
        self._count = 0  # calls of advance()
        self._advanced: Future[None] | None = None  # matchers have consumed the tokens of the last advance()
        self._built: Future[None] | None = None  # masks of the last advance() are complete
        self._awaited: Future[None] | None = None  # the last future that wait() has waited for
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
        """Starts advancing `receivers` by the tokens, one each in order, and building the next masks of `sequences`,
        the distinct ones among them. Returns at once; `tokens` is called on the masks' thread and may wait for the
        device."""
        self._count += 1
        number = self._count
        advanced = self._thread.submit(lambda: self._advance_matchers(receivers, tokens, sequences, collect_forced))
        self._built = self._thread.submit(lambda: self._build_masks(number, advanced, sequences))
        self._advanced = advanced

    def wait_for_tokens(self) -> None:
        """Waits until all tokens given so far are consumed by the matchers. Raises Internal if the thread hangs, and
        errors of the library."""
        if self._advanced is not None:
            wait(self._advanced, self)

    def wait(self) -> None:
        """Waits until all masks are built and reports the time that took. Raises Internal if the thread hangs, and
        errors of the library."""
        built = self._built
        if built is not None and built is not self._awaited:
            self._awaited = built
            began = time.perf_counter()
            wait(built, self)
            self._grammars.observer.observe_mask_wait(time.perf_counter() - began)

    def device_masks(self, slots: slice) -> Tensor:
        """Returns the masks, [num_slots, num_words], for kernels launched from now on; valid at `slots`.

        Waits for the masks on the CPU; on CUDA the stream waits for them.
        """
        if self._gate is None:
            self.wait()
        else:
            self._gate.copy_after(self._count, self._on_device[slots], self._memory[slots])
        return self._on_device

    def step_masks(self, sequences: Sequence[ConstrainedSequence]) -> StepMasks | None:
        """Returns a handle that waits for all masks so far, or None if there are none."""
        return None if self._built is None else StepMasks(self, self._built, self._count, sequences)

    def give_up(self) -> None:
        """Abandons the builder with its thread, and opens the gate, so that a stream that waits for masks continues.
        Thread-safe."""
        self.is_hung = True
        if self._gate is not None:
            self._gate.open_permanently()

    @property
    def busy_since(self) -> float | None:
        return self._busy_since

    def fill(self, sequences: Sequence[ConstrainedSequence], places: Sequence[int], masks: I32) -> None:
        """Fills masks[places[i]] of `sequences[i]` with the allowed tokens, end tokens included; sequences that have
        ended or failed allow nothing. Called on the masks' thread, or while it is idle."""
        live = [(sequence, place) for sequence, place in zip(sequences, places, strict=True) if sequence.is_live]
        if live:
            self._filler.fill([sequence for sequence, _ in live], [place for _, place in live], masks)
        for sequence, place in zip(sequences, places, strict=True):
            sequence.allow_end_tokens(masks[place])

    def gather(self, slots: Rows) -> Tensor:
        """Returns a copy of the masks of these slots, [num_slots, num_words], that may be modified until the next call.
        Earlier steps no longer read the pinned memory: their tokens have arrived."""
        if self._staged is None or len(self._staged) < len(slots):  # rows after drafts have masks of their own
            self._staged = self._allocate_masks(2 * len(slots))
        staged = self._staged[: len(slots)]
        # NumPy, because threads of torch's pool would keep spinning after a copy and slow those that fill masks.
        np.take(self._masks, slots, axis=0, out=staged.numpy(), mode="clip")
        return staged

    def _allocate_masks(self, num_masks: int) -> Tensor:
        """Allocates masks that allow nothing until they are filled."""
        return torch.zeros((num_masks, self._num_words), dtype=torch.int32, pin_memory=self._for_cuda)

    # Methods that run on the masks' thread

    def _advance_matchers(
        self,
        receivers: Sequence[ConstrainedSequence],
        tokens: TokenSource,
        sequences: Sequence[ConstrainedSequence],
        collect_forced: bool,
    ) -> None:
        """Waits for the token ids and advances the matchers: those with one token each in one call, slow ones and
        sequences with several tokens one by one. Collects forced tokens on request."""
        token_ids = tokens()
        self._busy_since = time.perf_counter()
        pairs = [*zip(receivers, token_ids, strict=True)]
        together: list[tuple[ConstrainedSequence, int]] = []
        if len(pairs) > 1 and [*receivers] == [*sequences]:  # one token per sequence
            together = [each for each in pairs if not each[0].advance_alone]
            pairs = [each for each in pairs if each[0].advance_alone]
        self._advance_together(together)
        for sequence, token_id in pairs:
            sequence.advance(token_id)
        if collect_forced:
            for sequence in sequences:
                sequence.forced_tokens = sequence.matcher.forced_tokens() if sequence.is_live else []

    def _advance_together(self, pairs: Sequence[tuple[ConstrainedSequence, int]]) -> None:
        """Advances sequences by a token each in one call of the library; one that does not accept its token fails."""
        moving = [(sequence, token_id) for sequence, token_id in pairs if sequence.should_advance(token_id)]
        if not moving:
            return
        accepted = self._filler.accept([sequence for sequence, _ in moving], [token_id for _, token_id in moving])
        for (sequence, token_id), is_right in zip(moving, accepted, strict=True):
            if not is_right:
                sequence.reject_token(token_id)

    def _build_masks(self, number: int, advanced: Future[None], sequences: Sequence[ConstrainedSequence]) -> None:
        """Fills the masks of `sequences` as batch `number`, notes which sequences failed in it, and lets streams that
        wait for this number continue, even if it raises."""
        try:
            advanced.result()  # raises its error
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
    """Handle of the masks that a step's sampling waits for: the batch of masks and its sequences."""

    _builder: MaskBuilder
    _masks: Future[None]
    _number: int
    _sequences: Sequence[ConstrainedSequence]

    def faults(self) -> dict[int, QuireError]:
        """Returns, by slot, the errors of sequences that failed in this step's masks or earlier ones; waits for the
        masks. Thread-safe."""
        wait(self._masks, self._builder)
        return {
            sequence.slot: sequence.error
            for sequence in self._sequences
            if sequence.error is not None
            and sequence.failed_mask_number is not None
            and sequence.failed_mask_number <= self._number
        }


def wait(job: Future[None], builder: MaskBuilder) -> None:
    """Waits for `job` in slices and raises its error. Raises Internal after MAX_WAIT_S and abandons the builder with
    its thread and the memory that this may still write to."""
    for _ in range(MAX_WAIT_SLICES):
        with contextlib.suppress(TimeoutError):
            job.exception(MAX_WAIT_S / MAX_WAIT_SLICES)
            break
    else:
        builder.give_up()
        raise Internal(f"grammar masks were not built within {MAX_WAIT_S:.0f} s")
    job.result()


def _watch(builder_ref: weakref.ref[MaskBuilder]) -> None:
    """Abandons a hanging builder from a thread of its own: while a stream waits, the launching thread may be blocked as
    well, e.g. loading a kernel, and could not notice that the masks' thread hangs."""
    seen, num_turns = None, 0
    while (builder := builder_ref()) is not None and not builder.is_hung:
        num_turns = num_turns + 1 if builder.busy_since is not None and builder.busy_since == seen else 0
        seen = builder.busy_since
        if num_turns > MAX_WAIT_SLICES:
            builder.give_up()
        del builder
        time.sleep(MAX_WAIT_S / MAX_WAIT_SLICES)
