"""Secret files: permissions, contents and rotation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.security import secret_file
from quire.shared.security.secret_file import SecretFile

FIRST, SECOND = "a" * 32, "b" * 32


def written(path: Path, *secrets: str) -> Path:
    path.write_text("\n".join(secrets) + "\n")
    path.chmod(0o600)
    return path


def test_the_first_is_shown_and_all_are_accepted(tmp_path: Path) -> None:
    held = SecretFile(str(written(tmp_path / "s", FIRST, "", SECOND)), "key_file")
    assert held.first == FIRST.encode()
    assert held.holds(FIRST.encode())
    assert held.holds(SECOND.encode())
    assert not held.holds(b"")
    assert not held.holds(FIRST[:-1].encode())


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        (FIRST, 0o604, "other users can open it"),
        ("", 0o600, "it is empty"),
        ("short", 0o600, "at least 32 characters"),
        (f"{FIRST}\nshort", 0o600, "at least 32 characters"),
        (FIRST * 3000, 0o600, "it has 96000 bytes; at most 65536 are read"),
    ],
)
def test_a_file_that_guards_nothing_is_refused_by_name(tmp_path: Path, content: str, mode: int, text: str) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match=f"key_file: .*{text}") as refused:
        SecretFile(str(path), "key_file")
    assert FIRST not in refused.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"key_file: '.*/none': cannot read it"):
        SecretFile(str(tmp_path / "none"), "key_file")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = written(tmp_path / "s", FIRST)
    held = SecretFile(str(path), "key_file")
    written(path, SECOND, FIRST)
    assert held.first == SECOND.encode()
    path.write_text("x")
    assert held.holds(FIRST.encode()), "what was there last stays"
    path.unlink()
    assert held.first == SECOND.encode()
    written(path, FIRST)
    assert held.all == (FIRST.encode(),)


def test_what_is_written_only_its_owner_can_open(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("from before")
    path.chmod(0o644)
    secret_file.write(path, FIRST)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert SecretFile(str(path), "key_file").first == FIRST.encode()
