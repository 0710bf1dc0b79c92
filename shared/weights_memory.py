"""Shared memory in which a trainer offers weights to workers of its host: naming of the segments, and identity of
the host."""

from __future__ import annotations

import re
from pathlib import Path

SEGMENTS = Path("/dev/shm")  # where Linux keeps POSIX shared memory
PREFIX = "quire-weights-"
NAME = re.compile(PREFIX + "[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> bytes:
    """Returns the boot id of this machine; empty if it has none."""
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return b""
