"""Reads and writes the WorkerHello of services that were built before its fields were grouped.

Each group's fields have kept the numbers that they had in WorkerHello itself, and no two groups share one. So the bytes
of an ungrouped hello can be parsed as each of the groups, and the bytes of all groups, put one after the other, are an
ungrouped hello. A worker sends both forms and a scheduler reads either, so that services are replaced one by one.
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
    """Repeats the fields of the groups in the message itself, where older schedulers look for them."""
    hello.MergeFromString(b"".join(getattr(hello, group).SerializeToString() for group in GROUPS))


def group(hello: pb.WorkerHello) -> None:
    """Fills the groups of a hello that has none, as older workers send it. Raises FailedPrecondition for bytes that are
    no hello."""
    if not any(hello.HasField(name) for name in GROUPS):
        sent = hello.SerializeToString()
        try:
            for name in GROUPS:
                getattr(hello, name).MergeFromString(sent)
        except DecodeError:
            text = f"hello: worker {hello.worker_id[:40]!r} sent fields that cannot be read; it is of another version"
            raise FailedPrecondition(text, field="hello") from None
    hello.DiscardUnknownFields()
