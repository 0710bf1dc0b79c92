"""Ports of a generation: what submits its sequences, and what admits its prompts piecewise."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.services.frontend.scheduler_client.placement import CachedTokens
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.shared.pb.common.v1.finish_pb2 import FinishReason


class Submitter(Protocol):
    """Submits sequences to schedulers and cancels them; implemented by the scheduler client."""

    def submit(self, sequences: Seq[Sequence], cached: CachedTokens) -> None:
        """Submits all samples of one prompt, in order, or one sequence with tokens. `cached`: prompt tokens cached per
        scheduler."""

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Cancels sequences; nothing more is delivered for them."""


class PromptSlots(Protocol):
    """Admission of a call that starts with some of its prompts and runs the others as those end."""

    num_samples: int  # that may run concurrently

    def start_next_prompts(self, piece: int, num_left: int) -> int:
        """Returns how many prompts, of `piece` samples each, may start after one has ended."""
