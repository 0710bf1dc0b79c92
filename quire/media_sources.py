"""Messages for media items of Python programs: URLs, paths and files in memory; other forms become files first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

FIELD = "multi_modal_data"
URL_SCHEMES = ("data:", "http:", "https:", "file:")


def source_part(item: Any, name: str | None, to_file: Callable[[Any], bytes]) -> pb.MediaPart:
    """Returns the message for one item. `name`: under which the frontend keeps it; without `item`, that of an earlier
    one; `to_file`: returns the bytes of a file for an item that is no URL, path or file, and raises InvalidArgument for
    values that are no item of the modality. Raises InvalidArgument, also for a file that cannot be read."""
    part = pb.MediaPart(name=name or "")
    if item is None and name:
        return part
    if isinstance(item, str) and item.startswith(URL_SCHEMES):
        part.url = item
    elif isinstance(item, bytes | bytearray | memoryview):
        part.content = bytes(item)
    elif isinstance(item, str | os.PathLike):
        part.content = _read(Path(item))
    else:
        part.content = to_file(item)
    return part


def _read(path: Path) -> bytes:
    """Reads an item's file. Raises InvalidArgument if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        text = f"{FIELD}: cannot read {str(path)!r:.200}: {error.strerror}"
        raise InvalidArgument(text, field=FIELD) from None


def listed(items: Any) -> list[Any]:
    """Returns items, or their names, as a list: one alone, several, or None for none."""
    if items is None:
        return []
    return list(items) if isinstance(items, list | tuple) else [items]
