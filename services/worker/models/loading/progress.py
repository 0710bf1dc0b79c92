"""Loading progress: written by the loading thread, read by status requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Loaded and total bytes of one model's weights, over all tensors of this rank."""

    loaded_bytes: int = 0
    """That have been found; the last of them may still be on their way."""
    total_bytes: int = 0
    """0: nothing is known yet."""
