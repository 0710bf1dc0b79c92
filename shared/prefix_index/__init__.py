"""The prefix index and registry in Redis: which worker holds which blocks, which schedulers and workers there are.

Schedulers write (services/scheduler/prefix_directory); schedulers and frontends read. Nothing here decides what is
cached: the scheduler that owns the blocks does. A wrong entry costs a detour, never a wrong hit.

`connect` is imported when it is first asked for: the client's library is a quarter of what a scheduler imports, and
most clusters have no Redis.
"""

from typing import TYPE_CHECKING, Any

from quire.shared.prefix_index.entries import LOG_ONLY, MalformedEntries, SchedulerEntry, WorkerEntry
from quire.shared.prefix_index.keys import BlockKeys, RegistryKeys
from quire.shared.prefix_index.reader import PrefixReader, RegistryReader, WorkerMatch

if TYPE_CHECKING:
    from quire.shared.prefix_index.connection import connect

__all__ = [
    "LOG_ONLY",
    "BlockKeys",
    "MalformedEntries",
    "PrefixReader",
    "RegistryKeys",
    "RegistryReader",
    "SchedulerEntry",
    "WorkerEntry",
    "WorkerMatch",
    "connect",
    "redis_error",
]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from quire.shared.prefix_index.connection import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def redis_error() -> type[Exception]:
    """What the client raises, as an `except` asks for it once something has been raised."""
    from redis.exceptions import RedisError

    return RedisError
