"""From where a worker takes weights while it runs: folders that its operator has named, and what lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.services.worker.host.allowed_folders import AllowedFolders
from quire.shared.errors import FailedPrecondition, InvalidArgument


class WeightFolders:
    """Any thread may call."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._allowed = AllowedFolders(roots) if roots else None

    def find(self, path: str) -> Path:
        """`path`: absolute, or relative to one of the folders. Raises FailedPrecondition where there are none, and
        InvalidArgument, with the same text whether something is there or not where the path leads out of them."""
        if self._allowed is None:
            text = "weights_folders: this worker was started with none: it reads no weights while it runs"
            raise FailedPrecondition(text, field="weights_folders")
        place = self._allowed.find(path)
        if place is None:
            text = f"path: {path!r} is not in a folder that this worker takes weights from (weights_folders)"
            raise InvalidArgument(text, field="path")
        if not place.is_dir():
            raise InvalidArgument(f"path: {path!r} is no folder", field="path")
        for file in sorted(place.iterdir()):
            if not self._allowed.has(file):
                text = f"path: {path!r} has a {file.name[:80]} that lies outside of weights_folders"
                raise InvalidArgument(text, field="path")
            if not (file.is_file() or file.is_dir()):  # a pipe would be waited for
                raise InvalidArgument(f"path: {path!r} has a {file.name[:80]} that is no regular file", field="path")
        return place
