"""Tensors as bytes behind the JSON of a body: the binary tensor data extension of the open inference protocol.

The header says how many bytes are JSON. BinaryTail them stand the bytes of those tensors that have a `binary_data_size`
instead of `data`, in the order in which the JSON names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from quire.shared.errors import InvalidArgument

HEADER = "inference-header-content-length"
SIZE = "binary_data_size"  # among the parameters of a tensor
WANTED, ALL_WANTED = "binary_data", "binary_data_output"  # among those of an output, and of the whole call
EXTENSION = "binary_tensor_data"  # its name in the server's metadata
MEDIA_TYPE = "application/octet-stream"
MAX_DIGITS = 15
MAX_SHOWN = 64  # characters of a wrong value


def json_bytes(http: Request, num_bytes: int) -> int | None:
    """How many of the body's bytes are JSON; None where nothing says that others follow. Raises InvalidArgument."""
    given = http.headers.getlist(HEADER)
    if not given:
        return None
    written = ", ".join(given)
    if not (written.isascii() and written.isdigit() and len(written) <= MAX_DIGITS):
        raise InvalidArgument(f"{HEADER} must be a number of bytes, got {shown(written)}.", field=HEADER)
    if not 0 < int(written) <= num_bytes:
        text = f"{HEADER} is {int(written)}: JSON comes first, in a body of {num_bytes} bytes."
        raise InvalidArgument(text, field=HEADER)
    return int(written)


class BinaryTail:
    """The bytes behind the JSON. One tensor after the other takes its own, so that no two share any."""

    def __init__(self, data: memoryview | None) -> None:
        """None: there was no header."""
        self._left = memoryview(b"") if data is None else data
        self._is_announced = data is not None

    def take(self, name: str, size: Any) -> memoryview:
        """Raises InvalidArgument."""
        if type(size) is not int or size < 0:
            raise InvalidArgument(f"{name}: {SIZE} must be a number of bytes, got {shown(size)}.", field="inputs")
        if not self._is_announced:
            raise InvalidArgument(f"{name} has a {SIZE}, and the header {HEADER} is missing.", field=HEADER)
        if size > len(self._left):
            text = f"{name}: {SIZE} is {shown(size)}, and {len(self._left)} bytes are left behind the JSON."
            raise InvalidArgument(text, field="inputs")
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def check_end(self) -> None:
        """Raises InvalidArgument where bytes are left."""
        if len(self._left):
            text = f"{len(self._left)} bytes behind the JSON belong to no tensor: no {SIZE} counts them."
            raise InvalidArgument(text, field="inputs")


def flag(parameters: Mapping[str, Any] | None, name: str, where: str, *, otherwise: bool) -> bool:
    """Raises InvalidArgument."""
    value = (parameters or {}).get(name, otherwise)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{where}: {name} must be true or false, got {shown(value)}.", field=where)
    return value


def shown(value: Any) -> str:
    return f"{value!r:.{MAX_SHOWN}}"
