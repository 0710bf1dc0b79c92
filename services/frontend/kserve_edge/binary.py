"""The binary tensor data extension of the open inference protocol: tensor bytes after the JSON part of a body.

A header gives the length of the JSON part. It is followed by the bytes of the tensors that have a `binary_data_size`
instead of `data`, in the order of the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request

from quire.shared.errors import InvalidArgument

HEADER = "inference-header-content-length"
SIZE = "binary_data_size"  # parameter of a tensor
REQUESTED, ALL_REQUESTED = "binary_data", "binary_data_output"  # parameters of an output, and of the call
EXTENSION = "binary_tensor_data"  # name of the extension in the server's metadata
MEDIA_TYPE = "application/octet-stream"
MAX_DIGITS = 15
MAX_SHOWN = 64  # characters of an invalid value in an error


def json_bytes(http: Request, num_bytes: int) -> int | None:
    """Returns the length of the JSON part; None if no header announces a binary part. `num_bytes`: of the whole body.
    Raises InvalidArgument for a header that is not a number from 1 to `num_bytes`."""
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
    """The bytes after the JSON part of a body. Each tensor takes its own in turn, so that no two share any."""

    def __init__(self, data: memoryview | None) -> None:
        """Wraps the bytes. None: the header was not sent."""
        self._rest = memoryview(b"") if data is None else data
        self._is_announced = data is not None

    def next_bytes(self, name: str, size: Any) -> memoryview:
        """Returns the next `size` bytes, for the tensor `name`. Raises InvalidArgument for an invalid size, fewer
        bytes, or a missing header."""
        if type(size) is not int or size < 0:
            raise InvalidArgument(f"{name}: {SIZE} must be a number of bytes, got {shown(size)}.", field="inputs")
        if not self._is_announced:
            raise InvalidArgument(f"{name} has a {SIZE}, and the header {HEADER} is missing.", field=HEADER)
        if size > len(self._rest):
            text = f"{name}: {SIZE} is {shown(size)}, and {len(self._rest)} bytes are left after the JSON."
            raise InvalidArgument(text, field="inputs")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def check_end(self) -> None:
        """Raises InvalidArgument if bytes are left that no tensor has taken."""
        if len(self._rest):
            text = f"{len(self._rest)} bytes after the JSON belong to no tensor: no {SIZE} counts them."
            raise InvalidArgument(text, field="inputs")


def flag(parameters: Mapping[str, Any] | None, name: str, where: str, *, otherwise: bool) -> bool:
    """Returns a boolean parameter, or `otherwise` if it is missing. `where`: names its owner in the error. Raises
    InvalidArgument for another type."""
    value = (parameters or {}).get(name, otherwise)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{where}: {name} must be true or false, got {shown(value)}.", field=where)
    return value


def shown(value: Any) -> str:
    return f"{value!r:.{MAX_SHOWN}}"
