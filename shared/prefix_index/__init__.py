"""The prefix index and registry in Redis: which worker holds which blocks, which schedulers and workers there are.

Schedulers write (services/scheduler/prefix_directory); schedulers and frontends read. Nothing here decides what is
cached: the scheduler that owns the blocks does. A wrong entry costs a detour, never a wrong hit.
"""

from shared.prefix_index.connection import connect
from shared.prefix_index.keys import BlockKeys, RegistryKeys
from shared.prefix_index.reader import Match, PrefixReader, RegistryReader, SchedulerEntry, WorkerEntry

__all__ = [
    "BlockKeys",
    "Match",
    "PrefixReader",
    "RegistryKeys",
    "RegistryReader",
    "SchedulerEntry",
    "WorkerEntry",
    "connect",
]
