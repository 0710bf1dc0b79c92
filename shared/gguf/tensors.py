"""Small tensors of a GGUF file that belong to its configuration."""

from __future__ import annotations

import struct

from quire.shared.gguf.header import Header, TensorPlace

MAX_FLOATS = 4096


def floats(header: Header, place: TensorPlace) -> list[float]:
    """A vector of F32. Raises InvalidArgument for any other."""
    (count,) = place.shape
    if place.kind.name != "F32" or count > MAX_FLOATS:
        raise header.refusal(f"tensor {place.name} is {place.kind.name} {list(place.shape)}: few F32 are needed")
    with place.path.open("rb") as file:
        file.seek(place.start)
        return list(struct.unpack(f"<{count}f", file.read(place.num_bytes)))
