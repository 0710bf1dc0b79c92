"""`python -m tests.breaking`: refuses protocol changes that would break a peer built from the last commit.

Compares with HEAD, or with HEAD~1 when the working tree is clean, so that CI checks the commit itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).with_name("buf")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def baseline() -> str | None:
    """Returns the commit to compare with; None in a new or shallow repository."""
    changed = git("status", "--porcelain", "--", "protos").stdout.strip()
    commit = "HEAD" if changed else "HEAD~1"
    known = git("cat-file", "-e", f"{commit}:protos/buf.yaml").returncode == 0
    return commit if known else None


def main() -> int:
    commit = baseline()
    if commit is None:
        print("protos: no earlier commit to compare with")
        return 0
    buf = str(BUF) if BUF.exists() else shutil.which("buf")
    assert buf is not None, "buf comes with the extra 'dev'"
    resolved = git("rev-parse", commit).stdout.strip()
    against = f".git#ref={resolved},subdir=protos"
    return subprocess.run([buf, "breaking", "protos", "--against", against], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
