"""Compatibility with WorkerHello messages from before their fields were grouped.

Each group's fields keep the numbers that they had in WorkerHello itself, and no two groups share a number. Therefore
the bytes of an ungrouped hello can be parsed as each of the groups, and the concatenated bytes of all groups are an
ungrouped hello. A worker sends both forms and a scheduler reads either, so that services can be upgraded one by one.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb

GROUPS = (
    "limits",
    "kv_cache",
    "held",
    "sampling",
    "drafting",
    "parallelism",
    "lora",
    "kv_transfer",
    "weights_state",
)


def add_ungrouped(hello: pb.WorkerHello) -> None:
    """Repeats the fields of the groups in the message itself, where older schedulers read them."""
    hello.MergeFromString(b"".join(getattr(hello, group).SerializeToString() for group in GROUPS))


def group(hello: pb.WorkerHello) -> None:
    """Fills the groups of a hello without any, as older workers send it. Raises FailedPrecondition for malformed
    bytes."""
    if not any(hello.HasField(name) for name in GROUPS):
        sent = hello.SerializeToString()
        try:
            for name in GROUPS:
                getattr(hello, name).MergeFromString(sent)
        except DecodeError:
            text = f"hello: worker {hello.worker_id[:40]!r} sent fields that cannot be read; it is of another version"
            raise FailedPrecondition(text, field="hello") from None
    hello.DiscardUnknownFields()
