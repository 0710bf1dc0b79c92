"""The commit that this installation was built from: written into wheels by setup.py, read from .git in a checkout."""

from __future__ import annotations

import functools
from pathlib import Path

FILE = "commit.txt"  # beside this module, in wheels and images
SHORT = 10  # hexadecimal digits
ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def commit() -> str:
    """Returns the abbreviated commit id; empty if neither a wheel's file nor a checkout provides it."""
    try:
        return Path(__file__).with_name(FILE).read_text().strip()[:SHORT]
    except OSError:
        return checkout_commit(ROOT)[:SHORT]


def checkout_commit(root: Path) -> str:
    """Returns the commit that HEAD of the checkout at `root` names, without running git; empty where there is none."""
    try:
        git = root / ".git"
        if git.is_file():  # a linked worktree: "gitdir: PATH"
            git = (root / git.read_text().split(":", 1)[1].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return _resolve(git, head.removeprefix("ref: "))
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _resolve(git: Path, ref: str) -> str:
    """Returns the commit that a ref names, from its file or from packed-refs, also for a linked worktree; empty if
    it has none. Raises OSError without packed-refs."""
    shared = git / "commondir"
    common = (git / shared.read_text().strip()).resolve() if shared.is_file() else git
    for folder in (git, common):
        if (folder / ref).is_file():
            return (folder / ref).read_text().strip()
    for line in (common / "packed-refs").read_text().splitlines():
        commit_id, _, name = line.partition(" ")
        if name == ref:
            return commit_id
    return ""
