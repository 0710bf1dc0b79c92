"""Tuning of glibc's malloc: how much freed memory it keeps per thread.

By default every thread has an arena of its own and caches up to 230 KiB of freed chunks that count as in use. gRPC
has a dozen threads, some of which free what others allocate, so a service grows by some 70 bytes a call for tens of
thousands of calls without leaking. With one arena for all threads and caching of small chunks only (larger ones are
rare here: Python has its own allocator) most of that growth ends after some thousand calls
(docs/benchmarks/long-runs.md).
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"  # read only at program start, and only by glibc
SMALL = {"frontend": 128, "scheduler": 128, "worker": 512}  # bytes; torch's operators allocate chunks of up to 400


def environment(role: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to add to the environment of a service of this role, which limit malloc's arenas and caches;
    empty if the caller has already set them or the role needs none."""
    if VARIABLE in inherited or role not in SMALL:
        return {}
    return {VARIABLE: f"glibc.malloc.arena_max=1:glibc.malloc.tcache_max={SMALL[role]}"}
