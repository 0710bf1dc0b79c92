"""Evicts files from the operating system's page cache, without privileges or effects on other processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def forget(folders: Iterable[Path]) -> None:
    """Evicts all files of the folders, so that the next read comes from disk, except for pages that another process
    has mapped."""
    for folder in folders:
        for path in _files(folder):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                continue
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names)
