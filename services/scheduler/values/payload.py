"""The part of a submission that the scheduler passes on to the worker unread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Payload:
    """What is passed on to the worker as it came."""

    params: bytes
    sample: int = 0
    grammar: bytes = b""
    num_logprobs: int | None = None  # of a beam: told with each token; None: as params have it
