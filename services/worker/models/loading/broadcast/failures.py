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
GONE = Unavailable("a rank of the group has left; create the group again")


class RemoteFailureError(Exception):
    """Raised when another member of the group has published a failure."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.said = message

    def as_quire_error(self, where: str) -> QuireError:
        """Returns the published error as a QuireError of the same kind."""
        try:
            error = from_proto(finish_pb2.Error.FromString(self.said))
        except DecodeError:
            return Unavailable(f"{where}: another rank of the group has failed")
        return type(error)(f"{where}: another rank of the group has failed: {error.message}", field=error.field)


def connect_store(order: pb.JoinWeightsGroup) -> TCPStore:
    """Connects to the trainer's store as a client. Raises RuntimeError."""
    timeout = timedelta(milliseconds=order.timeout_ms)
    host, port, size = order.master_address, order.master_port, order.world_size
    return TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def encoded(error: BaseException) -> bytes:
    """Returns the error as a serialized Error message; errors of other libraries become Internal."""
    known = error if isinstance(error, QuireError) else Internal(f"{type(error).__name__}: {error}")
    return to_proto(known).SerializeToString()


def publish_failure(store: TCPStore, name: str, error: BaseException) -> None:
    """Writes the failure to the group's store; the first one of a group is kept.

    Returns once it is stored, so that others read it before connections to this member break, or after PATIENCE_S: the
    store of a hanging trainer hangs as well. Raises nothing if the trainer has exited.
    """

    def put() -> None:
        store.compare_set(failed_key(name), "", encoded(error).hex())

    with contextlib.suppress(RuntimeError, TimeoutError):  # the trainer has exited
        BackgroundThreads("failed group").submit(put).result(PATIENCE_S)
