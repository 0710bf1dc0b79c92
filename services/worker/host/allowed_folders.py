"""Folders that an operator allows a worker to read at run time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class AllowedFolders:
    """Resolves paths within allowed folders, following links first. Callable from any thread."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    def find(self, path: str) -> Path | None:
        """Returns the resolved path; `path` is absolute or relative to one of the folders. None if it leads outside of
        them, whether it exists or not; a path that may not exist if none of the candidates is a folder."""
        places = [Path(os.path.realpath(root / path)) for root in self._roots]  # an absolute path ignores the root
        inside = [place for place in places if self._has(place)]
        return next((place for place in inside if place.is_dir()), inside[0]) if inside else None

    def has(self, file: Path) -> bool:
        """Returns whether the file, with its links resolved, lies within the folders."""
        return self._has(Path(os.path.realpath(file)))

    def _has(self, place: Path) -> bool:
        return any(place.is_relative_to(root) for root in self._roots)
