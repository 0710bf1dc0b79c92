"""Errors for an unreadable config.json name the file and the problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "config.json is not JSON"),
        (b'{"vocab_size": 5', "config.json is not JSON"),
        (b"\xff\xfe\0", "config.json is not JSON"),
        (b"[]", "config.json is not a JSON object"),
    ],
)
def test_a_torn_file_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InvalidArgument, match=text):
        read_config(tmp_path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InvalidArgument, match=r"cannot read .*config.json: Is a directory"):
        read_config(tmp_path)
