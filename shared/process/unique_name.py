"""Assigns unique default names to several processes of one service on a machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from quire.shared.errors import FailedPrecondition
from quire.shared.process.runtime_folder import runtime_folder
from quire.shared.settings import Settings

S = TypeVar("S", bound=Settings)


@contextlib.contextmanager
def with_unique_name(settings: S) -> Iterator[S]:
    """Yields the settings with an id: the default name with the lowest number that no other process of this user
    has, so that restarted processes get their names back: worker-HOST, worker-HOST-2. Without a runtime folder the
    name is not numbered."""
    if settings.id:
        yield settings
        return
    with contextlib.ExitStack() as kept:
        name = settings.name
        with contextlib.suppress(FailedPrecondition, OSError):
            name, lock = _take(runtime_folder(), settings.name)
            kept.callback(os.close, lock)
        yield settings.model_copy(update={"id": name})


def _take(folder: Path, default: str) -> tuple[str, int]:
    """Returns the first free name (`default`, then with -2, -3, ...) and the descriptor of its lock file, which
    reserves it until it is closed."""
    for number in itertools.count(1):
        name = default if number == 1 else f"{default}-{number}"
        lock = os.open(folder / f"{quote(name, safe='')}.name", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # per process: a child that outlives it does not keep the lock
        except BlockingIOError:
            os.close(lock)
        except BaseException:
            os.close(lock)
            raise
        else:
            return name, lock
    raise AssertionError("there is always another number")
