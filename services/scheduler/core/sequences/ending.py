"""When and why a sequence ends. The rules stand here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.services.scheduler.core.sequences.sequence import Sequence


class Reason(Enum):
    """Why a sequence ended; the wire's FinishReason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REPETITION = "repetition"


ANSWERED = frozenset({Reason.STOP, Reason.LENGTH, Reason.REPETITION})


@dataclass(frozen=True, slots=True)
class Failure:
    """Error that a client gets for a sequence that could not go on. `code`: the wire's ErrorCode without its prefix."""

    code: str
    message: str
    retry_after_ms: int = 0


class Ending(NamedTuple):
    """End of a sequence by its last token."""

    reason: Reason
    stop_token_id: int | None = None  # to be reported: none for end of sequence


def ending_of(sequence: Sequence, token: int) -> Ending | None:
    """Whether `token`, the last one that `sequence` has, ends it: a stop token before the limit, that before
    repetition."""
    if token in sequence.stop_token_ids or token in sequence.eos_token_ids:
        return Ending(Reason.STOP, sequence.stop_token_id(token))
    num_tokens = sequence.num_tokens
    if num_tokens >= sequence.max_total_tokens:
        return Ending(Reason.LENGTH)
    rule = sequence.repetition
    if rule is not None and num_tokens - sequence.num_prompt_tokens >= sequence.min_output_tokens:
        return Ending(Reason.REPETITION) if rule.repeats(sequence.last_output(rule.window)) else None
    return None
