"""Folders from which a worker may load weights while it serves, as named by its operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.services.worker.host.allowed_folders import AllowedFolders
from quire.shared.errors import FailedPrecondition, InvalidArgument


class WeightFolders:
    """Resolves paths within the allowed folders. Thread-safe."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._allowed = AllowedFolders(roots) if roots else None

    def find(self, path: str) -> Path:
        """Resolves `path`, absolute or relative to one of the folders, to an existing folder without links to the
        outside.

        Raises FailedPrecondition if no folders are allowed, and InvalidArgument if the path leads outside, with the
        same text whether the target exists or not, is no folder, or has pipes or the like in it.
        """
        if self._allowed is None:
            text = "weights_folders: this worker was started without it, so weights cannot be updated from a folder"
            raise FailedPrecondition(text, field="weights_folders")
        place = self._allowed.find(path)
        if place is None:
            text = f"path: {path!r} must be in one of the worker's weights_folders"
            raise InvalidArgument(text, field="path")
        if not place.is_dir():
            raise InvalidArgument(f"path: {path!r} is not a folder", field="path")
        for file in sorted(place.iterdir()):
            if not self._allowed.has(file):
                text = f"path: {path!r} has a {file.name[:80]} that links to a place outside of weights_folders"
                raise InvalidArgument(text, field="path")
            if not (file.is_file() or file.is_dir()):  # opening a pipe would block
                raise InvalidArgument(f"path: {path!r} has a {file.name[:80]} that is not a regular file", field="path")
        return place
