"""Names of the blocks in a transfer order: KV group and hash (shared/kv/block_hash.py)."""

from __future__ import annotations

from quire.services.worker.step.plan_violation import require
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.pb.worker.v1 import worker_pb2 as pb


def names_of(order: pb.Transfer | pb.DiskTransfer, num_groups: int) -> list[bytes]:
    """Returns one name per hash of the order; without groups every block is of group 0. Raises PlanViolation for
    incomplete hashes, unequal counts and unknown groups."""
    num_hashes, rest = divmod(len(order.block_hashes), block_hash.HASH_BYTES)
    require(rest == 0, lambda: f"a transfer with {len(order.block_hashes)} bytes of hashes")
    groups = columns.u32(order.block_groups)
    require(len(groups) in (0, num_hashes), lambda: f"a transfer of {num_hashes} hashes and {len(groups)} groups")
    known = len(groups) == 0 or int(groups.max()) < num_groups
    require(known, lambda: f"a transfer of blocks of group {groups.max()}, of {num_groups}")
    return block_hash.split_names(order.block_hashes, order.block_groups)
