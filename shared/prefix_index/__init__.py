"""The prefix index and service registry in Redis: which worker holds which blocks, and which schedulers and workers
exist.

Schedulers write (services/scheduler/prefix_directory); schedulers and frontends read. The index is only a hint: the
scheduler that owns the blocks decides what is cached, so a wrong entry costs a detour, never a wrong hit.

`connect` is imported lazily: the client library is a quarter of what a scheduler imports, and most clusters have no
Redis.
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
    """Imports connect(), and with it the Redis client, when it is first used. Raises AttributeError for other names."""
    if name == "connect":
        from quire.shared.prefix_index.connection import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def redis_error() -> type[Exception]:
    """Returns the client library's base exception, for an `except` clause."""
    from redis.exceptions import RedisError

    return RedisError
