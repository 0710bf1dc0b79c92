"""Loading progress: written by the loading thread, read by status requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Loaded and total bytes of one model's weights, over all tensors of this rank."""

    loaded_bytes: int = 0
    """Bytes that have been submitted for loading; the last of them may still be in transfer."""
    total_bytes: int = 0
    """0: nothing is known yet."""
