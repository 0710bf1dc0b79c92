"""Folders that an operator lets a worker read from while it runs, and what lies in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class AllowedFolders:
    """Links are followed before it is decided where a path lies. Any thread may ask."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    def find(self, path: str) -> Path | None:
        """`path`: absolute, or relative to one of the folders. None if it leads out of them, whether something is there
        or not; a place that may have nothing in it if nowhere is a folder."""
        places = [Path(os.path.realpath(root / path)) for root in self._roots]  # the same for an absolute one
        inside = [place for place in places if self._has(place)]
        return next((place for place in inside if place.is_dir()), inside[0]) if inside else None

    def has(self, file: Path) -> bool:
        """Wherever its links lead."""
        return self._has(Path(os.path.realpath(file)))

    def _has(self, place: Path) -> bool:
        return any(place.is_relative_to(root) for root in self._roots)
