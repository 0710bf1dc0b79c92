"""What lies below a worker's device."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # this module is also read where there is no torch
    from quire.services.worker.kv.host_memory import HostMemory
    from quire.services.worker.offload.disk_store import DiskStore


class Tiers(NamedTuple):
    """None where there is none."""

    host_memory: HostMemory | None = None
    disk: DiskStore | None = None
    identity: bytes = b""  # of what they keep over restarts

    def forget(self, *, changed: bool) -> None:
        """All that they hold. `changed`: what comes is of weights that no later life can have."""
        identity = secrets.token_bytes(32) if changed else self.identity
        if self.host_memory is not None:
            self.host_memory.forget(identity)
        if self.disk is not None:
            self.disk.renew(identity)


NOTHING_BELOW = Tiers()
