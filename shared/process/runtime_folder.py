"""The runtime folder: shared by the processes of one user on a machine, and accessible to this user only."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from quire.shared.errors import FailedPrecondition

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"


def runtime_folder() -> Path:
    """Returns the folder, in XDG's runtime folder or else the temporary one; creates it if needed. Raises
    FailedPrecondition if it cannot be created or other users can open it."""
    parent = os.environ.get(RUNTIME_VARIABLE)
    path = Path(parent, "quire") if parent else Path(tempfile.gettempdir(), f"quire-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise FailedPrecondition(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise FailedPrecondition(f"{path} must be a folder that only this user can open (chmod 700)")
    return path
