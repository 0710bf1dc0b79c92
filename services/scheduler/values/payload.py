"""Fields of a submission that the scheduler passes to the worker unread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Payload:
    """Fields of a submission for the worker, which the scheduler does not read."""

    params: bytes
    sample: int = 0
    grammar: bytes = b""
    num_logprobs: int | None = None  # of a beam: log-probabilities per token; None: as in params
