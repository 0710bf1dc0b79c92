"""Publishes a failure of one group member to the others, which would otherwise wait for their timeouts.

Failures are written to the trainer's store, which all members know, on whichever host they run.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

from google.protobuf.message import DecodeError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from quire.services.worker.host.background import BackgroundThreads
from quire.services.worker.models.loading.broadcast.gloo_receiver import failed_key
from quire.shared.errors import Internal, QuireError, Unavailable, from_proto, to_proto
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

PATIENCE_S = 1.0
GONE = Unavailable("a rank of the group is gone")


class RemoteFailureError(Exception):
    """Raised when another member of the group has published a failure."""

    def __init__(self, said: bytes) -> None:
        super().__init__(said)
        self.said = said

    def as_quire_error(self, where: str) -> QuireError:
        """Returns the published error as a QuireError of the same kind."""
        try:
            told = from_proto(finish_pb2.Error.FromString(self.said))
        except DecodeError:
            return Unavailable(f"{where}: another rank of the group has failed")
        return type(told)(f"{where}: another rank of the group has failed: {told.message}", field=told.field)


def connect_store(order: pb.JoinWeightsGroup) -> TCPStore:
    """Connects to the trainer's store as a client. Raises RuntimeError."""
    timeout = timedelta(milliseconds=order.timeout_ms)
    host, port, size = order.master_address, order.master_port, order.world_size
    return TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def encoded(error: BaseException) -> bytes:
    known = error if isinstance(error, QuireError) else Internal(f"{type(error).__name__}: {error}")
    return to_proto(known).SerializeToString()


def publish_failure(store: TCPStore, name: str, error: BaseException) -> None:
    """Publishes the failure; the first one of a group is kept.

    Returns once it is stored, so that others read it before connections to this member break, or after a short timeout:
    the store of a hanging trainer hangs as well.
    """

    def put() -> None:
        store.compare_set(failed_key(name), "", encoded(error).hex())

    with contextlib.suppress(RuntimeError, TimeoutError):  # the trainer has exited
        BackgroundThreads("failed group").submit(put).result(PATIENCE_S)
