"""Conversion of KV groups to and from WorkerHello.kv_cache.groups."""

from __future__ import annotations

from collections.abc import Sequence

from quire.shared.errors import FailedPrecondition
from quire.shared.kv.kv_specs import (
    FULL,
    NOTHING,
    ONE_FULL,
    Cross,
    Full,
    KVGroup,
    KVSpec,
    Latent,
    Nothing,
    State,
    Window,
)
from quire.shared.pb.worker.v1 import worker_pb2 as pb

MOST_GROUPS = 64
MOST_WINDOW = 2**27
MOST_LATENT = 2**16
MOST_STATE_BYTES = 2**40
MOST_CROSS = 2**24


def to_proto(groups: Sequence[KVGroup]) -> list[pb.KVGroup]:
    """Returns the groups as protos; empty for the common case of one group with full attention."""
    if [group.spec for group in groups] == [FULL]:
        return []
    return [_group_to_proto(group) for group in groups]


def _group_to_proto(group: KVGroup) -> pb.KVGroup:
    """Returns the wire message of a KV group: its spec and its number of layers."""
    wire = pb.KVGroup(num_layers=len(group.layers))
    match group.spec:
        case Full():
            wire.full.SetInParent()
        case Window(length):
            wire.window.length = length
        case Latent(rank, rope):
            wire.latent.rank, wire.latent.rope = rank, rope
        case State(num_bytes):
            wire.state.num_bytes = num_bytes
        case Cross(length):
            wire.cross.length = length
        case Nothing():
            wire.nothing.SetInParent()
    return wire


def from_proto(wire: Sequence[pb.KVGroup], who: str) -> tuple[KVSpec, ...]:
    """Returns the specs of the groups. Raises FailedPrecondition for specs that this scheduler cannot plan."""
    if len(wire) > MOST_GROUPS:
        raise FailedPrecondition(f"kv_groups: {who} has {len(wire)}, the limit is {MOST_GROUPS}", field="kv_groups")
    specs = tuple(_spec_from_proto(group, f"kv_groups[{i}]", who) for i, group in enumerate(wire)) or ONE_FULL
    if NOTHING in specs and len(specs) > 1:
        text = f"kv_groups: {who} has layers without KV in addition to others, which is not supported"
        raise FailedPrecondition(text, field="kv_groups")
    if any(isinstance(spec, Cross) for spec in specs[:-1]) or isinstance(specs[0], Cross):
        text = f"kv_groups: {who} has a cross group that is not the last of several groups, which is not supported"
        raise FailedPrecondition(text, field="kv_groups")
    return specs


def _spec_from_proto(group: pb.KVGroup, field: str, who: str) -> KVSpec:
    """Returns the spec of a group. Raises FailedPrecondition, naming `field` and `who`, for sizes out of range and
    for unknown specs."""
    kind = group.WhichOneof("spec")
    if kind == "full":
        return FULL
    if kind == "nothing":
        return NOTHING
    if kind == "latent":
        for name, size in (("rank", group.latent.rank), ("rope", group.latent.rope)):
            if not 1 <= size <= MOST_LATENT:
                text = f"{field}.latent.{name}: {who} has {size}, it must be 1 to {MOST_LATENT}"
                raise FailedPrecondition(text, field="kv_groups")
        return Latent(group.latent.rank, group.latent.rope)
    if kind == "state":
        return _state_from_proto(group.state.num_bytes, field, who)
    if kind == "cross":
        length = group.cross.length
        if not 1 <= length <= MOST_CROSS:
            text = f"{field}.cross.length: {who} has {length}, it must be 1 to {MOST_CROSS}"
            raise FailedPrecondition(text, field="kv_groups")
        return Cross(length)
    if kind == "window":
        length = group.window.length
        if not 1 <= length <= MOST_WINDOW:
            text = f"{field}.window.length: {who} has {length}, it must be 1 to {MOST_WINDOW}"
            raise FailedPrecondition(text, field="kv_groups")
        return Window(length)
    text = f"{field}: {who} has {kind or 'no spec that this scheduler knows'}, which is not supported"
    raise FailedPrecondition(text, field="kv_groups")


def _state_from_proto(num_bytes: int, field: str, who: str) -> State:
    """Returns the spec of a recurrent state. Raises FailedPrecondition for a size out of range."""
    if not 1 <= num_bytes <= MOST_STATE_BYTES:
        text = f"{field}.state.num_bytes: {who} has {num_bytes}, it must be 1 to {MOST_STATE_BYTES}"
        raise FailedPrecondition(text, field="kv_groups")
    return State(num_bytes)
