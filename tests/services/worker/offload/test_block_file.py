"""The file of a block: whatever happened to it is noticed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.services.worker.offload import block_file
from quire.services.worker.offload.block_file import HEADER_BYTES, BlockMismatch
from quire.shared.kv.block_hash import page_name

IDENTITY, NAME = b"i" * 32, b"n" * 32
CONTENT = bytes(range(256)) * 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "block.kv"
    block_file.write(path, block_file.header(IDENTITY, NAME, CONTENT), CONTENT)
    return path


def read(path: Path, identity: bytes = IDENTITY, name: bytes = NAME, num_bytes: int = len(CONTENT)) -> bytes:
    content = bytearray(num_bytes)
    block_file.read_into(path, identity, name, content)
    return bytes(content)


def test_a_block_comes_back_as_it_was_written_and_is_nobody_elses_to_read(path: Path) -> None:
    assert read(path) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("place", [0, 7, 12, 20, 50, 90, 120, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_a_changed_bit_is_noticed_wherever_it_is(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(BlockMismatch):
        read(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 0), "shorter than its header"),
        (lambda path: os.truncate(path, HEADER_BYTES + 100), "its length differs from its header"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "its length differs from its header"),
        (lambda path: os.truncate(path, HEADER_BYTES) or os.truncate(path, HEADER_BYTES + 2048), "checksum"),
    ],
)
def test_a_file_of_another_length_is_noticed(path: Path, change: Callable[[Path], object], said: str) -> None:
    change(path)
    with pytest.raises(BlockMismatch, match=said):
        read(path)


def test_what_is_another_block_or_another_models_is_noticed(path: Path) -> None:
    with pytest.raises(BlockMismatch, match="holds another block"):
        read(path, name=b"m" * 32)
    with pytest.raises(BlockMismatch, match="holds another block"):
        read(path, name=page_name(NAME, 1))
    with pytest.raises(BlockMismatch, match="other weights or another layout"):
        read(path, identity=b"j" * 32)
    with pytest.raises(BlockMismatch, match="holds 2048 bytes, and a block has 2047"):
        read(path, num_bytes=2047)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    (tmp_path / "link").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        read(tmp_path / "link")
    with pytest.raises(BlockMismatch, match="not a regular file"):
        read(Path("/dev/null"))
