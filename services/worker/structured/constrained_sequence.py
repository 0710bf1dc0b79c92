"""State of a sequence under a grammar: its matcher, whether it may or must end, and its error."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.structured.fair_filler import SLOW_TOKEN_S, TokenPace
from quire.services.worker.structured.port import Matcher
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.structured_output.checks import DEAD_END, without_grammar

MASK_BITS = 32


class ConstrainedSequence:
    """Sequence under a grammar: its matcher, whether it has ended or must end, its error, and the cost of its tokens
    and masks."""

    def __init__(self, slot: int, matcher: Matcher, admission: SlotAdmission, vocab_size: int) -> None:
        self.slot = slot
        self.grammar_id = admission.grammar_id
        self.tenant = admission.tenant
        self.matcher = matcher
        self.eos_ids = [i for i in columns.u32(admission.eos_token_ids).tolist() if i < vocab_size]
        self.may_end_early = not admission.sampling.ignore_eos
        self.ended = False
        self.must_end = False  # the grammar allows no further token
        self.error: QuireError | None = None
        self.failed_mask_number: int | None = None  # number of the mask batch in which its mask failed
        self._pace = TokenPace()
        self.forced_tokens: list[int] = []  # tokens that must come next
        self.advance_alone = False
        self.token_s = 0.0
        self.cost_s = 0.0
        self.was_too_slow = False
        self.fill_alone = False

    @property
    def is_live(self) -> bool:
        return not self.ended and self.error is None

    def advance(self, token_id: int) -> None:
        """Advances the matcher by a sampled token; a negative one means that none was sampled. Fails the sequence if
        the grammar does not allow it, or its tokens have become too slow."""
        if not self.should_advance(token_id):
            return
        if not self._accepts(token_id):
            self.reject_token(token_id)
        elif self._pace.is_slow:
            self.fail_as_too_slow(str(self._pace))

    def should_advance(self, token_id: int) -> bool:
        """Returns whether the matcher has to consume the token: the sequence is live, and the token does not end it.
        Marks the sequence as ended by an end token."""
        if token_id < 0 or not self.is_live:
            return False
        self.ended = token_id in self.eos_ids
        return not self.ended

    def reject_token(self, token_id: int) -> None:
        """Fails the sequence for a token that its matcher did not accept: a library at its limits accepts none."""
        if not self._fail_by_fault():
            self.fail(f"the grammar does not allow token {token_id}, which the output contains")

    def _fail_by_fault(self) -> bool:
        """Fails the sequence with the matcher's fault and returns True, or returns False if it has none."""
        fault = self.matcher.fault
        if DEAD_END in fault:
            self.fail("the grammar reached a state where no continuation is allowed, although the text is incomplete")
        elif fault:
            self.fail(f"the grammar became too complex: {without_grammar(fault)}")
        return bool(fault)

    def _accepts(self, token_id: int) -> bool:
        """Consumes the token and records the CPU time that it took; a slow one makes the next be consumed and timed
        separately again."""
        began = time.thread_time()
        accepted = self.matcher.accept_sampled(token_id)
        seconds = time.thread_time() - began
        self.advance_alone = seconds > SLOW_TOKEN_S
        self.token_s = seconds
        self._pace.add(seconds)
        return accepted

    def try_advance(self, token_ids: Sequence[int]) -> bool:
        """Advances the matcher by all of these tokens and returns True, or by none if the grammar does not allow them
        all or one is an end token."""
        if any(token_id in self.eos_ids for token_id in token_ids):
            return False
        num_accepted = self.matcher.accept(token_ids)
        if num_accepted < len(token_ids):
            self.matcher.rollback(num_accepted)
        return num_accepted == len(token_ids)

    def allow_end_tokens(self, mask: I32) -> None:
        """Adds the request's end tokens to a filled mask where the text is complete and may or must end; clears the
        mask of a sequence that is not live. Sets `must_end` if the grammar allows no other token."""
        if not self.is_live or self._fail_by_fault():
            mask[:] = 0
        elif not self.matcher.can_end:
            return
        self.must_end = not mask.any()
        if self.must_end or self.may_end_early:
            for token_id in self.eos_ids:
                mask[token_id // MASK_BITS] |= bit(token_id)

    def fail_as_too_slow(self, text: str) -> None:
        """Fails the sequence with InvalidArgument and marks it, so that its grammar is counted as slow when the slot is
        released."""
        self.was_too_slow = True
        self.fail(f"the grammar is too slow: {text}")

    def fail(self, text: str) -> None:
        self.error = InvalidArgument(f"structured_output: {text}", field="structured_output")


def bit(token_id: int) -> np.int32:
    """Returns the bit of a token in its mask word, the word number token_id // 32."""
    return np.uint32(1 << token_id % MASK_BITS).view(np.int32)
