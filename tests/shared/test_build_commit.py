"""The commit of an installation is read from a checkout without running git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quire.shared.build_commit import checkout_commit


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    return folder


def test_a_branch_a_detached_head_and_packed_references(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert checkout_commit(checkout) == head
    git(checkout, "pack-refs", "--all")
    assert checkout_commit(checkout) == head
    git(checkout, "checkout", "--quiet", "--detach")
    assert checkout_commit(checkout) == head


def test_a_linked_worktree(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "other"))
    assert checkout_commit(tmp_path / "other") == git(checkout, "rev-parse", "other")


def test_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert checkout_commit(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert checkout_commit(tmp_path) == ""
