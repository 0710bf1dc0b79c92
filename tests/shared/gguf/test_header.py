"""A header is read completely, or refused with a precise and cheap error."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.gguf.folder import as_folder
from quire.shared.gguf.header import read_header
from tests import gguf_files
from tests.gguf_files import Tensor, text
from tests.shared.gguf.conftest import Write

ONE_ROW = bytes(4 * 32)


def test_values_and_places_come_back(write: Write) -> None:
    header = read_header(write({"a.flag": True, "a.list": [1.5, 2.5], "a.text": "\u00e9"}))
    assert header.metadata["a.flag"] is True
    assert header.metadata["a.list"] == [1.5, 2.5]
    assert header.metadata["a.text"] == "\u00e9"
    place = header.tensors["token_embd.weight"]
    assert (place.shape, place.kind.name, place.num_bytes) == ((40, 32), "F32", 40 * 32 * 4)
    assert header.path.read_bytes()[place.start : place.start + 8] == struct.pack("<ff", 1, 1)


def test_wherever_a_file_is_cut_off_it_says_so(write: Write) -> None:
    file = write()
    whole = file.read_bytes()
    header_ends = min(place.start for place in read_header(file).tensors.values())
    for size in [*range(4, header_ends, 97), header_ends, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(InvalidArgument, match=r"small\.gguf: .*it is cut off"):
            as_folder(file)


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (b"", "cannot read it"),
        (b"GGML" + bytes(40), "it is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "another byte order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "1152921504606846976 tensors; at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9223372036854775808 keys; at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40), "bytes of a key; at most 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", 8, 2**62), "bytes of k; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**50), "items of k; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**20), "cut off in k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "an array of type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77), "a value of type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 9), "9 dimensions of t; at most 4"),
    ],
)
def test_what_a_file_claims_is_not_believed(tmp_path: Path, begin: bytes, reason: str) -> None:
    file = tmp_path / "claims.gguf"
    file.write_bytes(begin)
    tracemalloc.start()
    with pytest.raises(InvalidArgument, match=reason):
        as_folder(file)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (Tensor((1, 32), 16, ONE_ROW), r"tensor odd has type 16 \(IQ2_XXS\); supported: F32, "),
        (Tensor((1, 32), 1234, ONE_ROW), r"tensor odd has type 1234 \(unknown\)"),
        (Tensor((1, 33), 8, ONE_ROW), r"tensor odd has shape \[1, 33\], which Q8_0 cannot have"),
        (Tensor((0, 32), 0, b""), r"tensor odd has shape \[0, 32\]"),
        (Tensor((), 0, ONE_ROW), r"tensor odd has shape \[\]"),
        (Tensor((2**40, 2**40), 0, ONE_ROW), r"tensor odd ends at byte \d+, and the file has \d+: it is cut off"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(write: Write, tensor: Tensor, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        as_folder(write(odd=tensor))


def test_no_two_tensors_share_bytes(write: Write) -> None:
    """Otherwise a small file could declare a large model."""
    file = write()
    content = file.read_bytes()
    second = text("output_norm.weight") + struct.pack("<IQI", 1, 32, 0)
    at = content.index(second) + len(second)
    file.write_bytes(content[:at] + struct.pack("<Q", 32) + content[at + 8 :])
    with pytest.raises(InvalidArgument, match=r"tensor output_norm\.weight begins at 32, inside of another"):
        as_folder(file)


def test_nothing_stands_twice(tmp_path: Path) -> None:
    key = text("k") + gguf_files.value(1)
    file = tmp_path / "twice.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key + key)
    with pytest.raises(InvalidArgument, match="it contains k twice"):
        read_header(file)


def test_any_damage_is_refused_or_harmless(write: Write) -> None:
    """Random header bytes cause no other error than the one that names the file."""
    file, rng = write(), random.Random(5)
    whole = file.read_bytes()
    header_ends = min(place.start for place in read_header(file).tensors.values())
    refusals = []
    for _ in range(400):
        spoiled = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(header_ends)] = rng.randrange(256)
        file.write_bytes(spoiled)
        try:
            as_folder(file)
        except InvalidArgument as error:
            refusals.append(error.message)
    assert len(refusals) > 100
    assert all(str(file) in message for message in refusals)
