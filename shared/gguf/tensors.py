"""Small tensors of a GGUF file that belong to its configuration."""

from __future__ import annotations

import struct

from quire.shared.gguf.header import Header, TensorPlace

MAX_FLOATS = 4096


def floats(header: Header, place: TensorPlace) -> list[float]:
    """Reads a small F32 vector from the file. Raises InvalidArgument for a tensor of another type, a longer one, and
    ValueError for one with several dimensions."""
    (count,) = place.shape
    if place.kind.name != "F32" or count > MAX_FLOATS:
        found = f"{place.kind.name} {list(place.shape)}"
        raise header.refusal(f"tensor {place.name} is {found}: a vector of at most {MAX_FLOATS} F32 is needed")
    with place.path.open("rb") as file:
        file.seek(place.start)
        return list(struct.unpack(f"<{count}f", file.read(place.num_bytes)))
