"""How far loading has come: written by the thread that loads, read by those who are asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Of the weights of one model."""

    loaded_bytes: int = 0
    """That have been found; the last of them may still be on their way."""
    total_bytes: int = 0
    """0: nothing is known yet."""
