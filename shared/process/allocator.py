"""How much of what has been freed the C library keeps for each thread of a service.

By default every thread has an arena of its own and up to 230 KiB of freed pieces that are counted as in use. gRPC has a
dozen threads, some of which free what others allocate, so that for tens of thousands of calls a service grows by some
70 bytes a call without having leaked one. With one arena for all and small pieces alone kept by thread (what is larger
is rare here: Python has its own allocator) most of that is over after some thousands (docs/benchmarks/long-runs.md).
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"  # read at a program's start alone, and by no other C library
SMALL = {"frontend": 128, "scheduler": 128, "worker": 512}  # bytes; torch's operators have pieces of up to 400


def environment(role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """To add for a service's process; nothing where somebody has decided otherwise."""
    if VARIABLE in inherited or role not in SMALL:
        return {}
    return {VARIABLE: f"glibc.malloc.arena_max=1:glibc.malloc.tcache_max={SMALL[role]}"}
