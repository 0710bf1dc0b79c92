"""Invalid safetensors headers are rejected in one line that names the file, without allocating the announced memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.models.loading.loader import named_tensors
from quire.shared.errors import InvalidArgument


def with_header(header: bytes, num_bytes: int | None = None, body: bytes = b"0000") -> bytes:
    return struct.pack("<Q", len(header) if num_bytes is None else num_bytes) + header + body


def tensor(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return with_header(json.dumps({"t": entry}).encode())


TWICE = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}

FILES = {
    "nothing": b"",
    "half a length": b"\0" * 7,
    "no header": with_header(b"", body=b""),
    "a header of 2^63 bytes": with_header(b"{}", 2**63),
    "a header of 2^64 - 1 bytes": with_header(b"{}", 2**64 - 1),
    "a header of 99 MB that is not there": with_header(b"{}", 99_000_000),
    "100,000 objects deep": with_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a shape 200,000 lists deep": with_header(
        b'{"t":{"dtype":"F32","shape":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    ),
    "a shape whose product overflows": tensor(shape=[2**62, 2**62]),
    "a number of 50,000 digits": with_header(b'{"t":{"dtype":"F32","shape":[' + b"9" * 50_000 + b"]}}"),
    "a tensor before the file": tensor(data_offsets=[-4, 0]),
    "a tensor of 4 TB behind its end": tensor(shape=[2**40], data_offsets=[0, 2**42]),
    "a tensor that ends before it begins": tensor(data_offsets=[4, 0]),
    "two tensors in one place": with_header(json.dumps(TWICE).encode()),
    "offsets that are no whole numbers": tensor(data_offsets=[0.0, 4.5]),
    "an unknown dtype": tensor(dtype="F33"),
    "no text": with_header(b"\xff\xfe{}"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_header_that_lies_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(FILES[name])
    with pytest.raises(InvalidArgument) as refused:
        list(named_tensors(tmp_path))
    assert refused.value.field == "model"
    assert "model.safetensors" in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 1_000


def test_consistent_header_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(tensor())
    ((name, source),) = named_tensors(tmp_path)
    assert (name, list(source.shape)) == ("t", [1])
