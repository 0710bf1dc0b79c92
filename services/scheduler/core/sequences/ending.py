"""Rules for the end of a sequence, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.services.scheduler.core.sequences.sequence import Sequence


class Reason(Enum):
    """Reason for the end of a sequence; corresponds to FinishReason on the wire."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REPETITION = "repetition"


ANSWERED = frozenset({Reason.STOP, Reason.LENGTH, Reason.REPETITION})


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a sequence that could not continue. `code`: ErrorCode of the wire without its prefix."""

    code: str
    message: str
    retry_after_ms: int = 0


class Ending(NamedTuple):
    """End of a sequence caused by its last token."""

    reason: Reason
    stop_token_id: int | None = None  # token to report; None for end of sequence


def ending_of(sequence: Sequence, token: int) -> Ending | None:
    """Returns how `token`, the last token of `sequence`, ends it, or None. A stop token takes precedence over the
    length limit, and that over repetition."""
    if token in sequence.stop_token_ids or token in sequence.eos_token_ids:
        return Ending(Reason.STOP, sequence.stop_token_id(token))
    num_tokens = sequence.num_tokens
    if num_tokens >= sequence.max_total_tokens:
        return Ending(Reason.LENGTH)
    rule = sequence.repetition
    if rule is not None and num_tokens - sequence.num_prompt_tokens >= sequence.min_output_tokens:
        return Ending(Reason.REPETITION) if rule.repeats(sequence.last_output(rule.window)) else None
    return None
