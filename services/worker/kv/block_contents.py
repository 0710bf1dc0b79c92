"""Contents of the KV blocks by hash, reported when the worker attaches, so that a new scheduler finds a warm cache.

A step only records which tokens were written where (a few array writes). Hashes are computed for the report: a block's
hash needs its tokens and its parent's hash, so each block records its parent and the parent's generation, which is
incremented on every allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32
from quire.shared.kv.block_hash import block_hash, page_of

Blocks = npt.NDArray[Any]  # block ids, any integer type

NO_MEDIA_PARTS: Mapping[int, bytes] = {}
NO_PARENT = 0  # the null block is the parent of every sequence's first block


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """Full blocks whose content is known, with hashes and KV groups."""

    block_ids: list[int]
    hashes: bytes  # 32 bytes each, same order
    groups: list[int]  # KV group of each, same order


class BlockContents:
    """Record of what each block holds. Arrays are [num_blocks]; each KV group has separate hash chains."""

    def __init__(self, num_blocks: int, block_size: int, *, windows: bool = False) -> None:
        """Creates a record in which no block is known. `windows`: the model has sliding windows, so that blocks are
        reallocated while their child blocks stay."""
        self._block_size = block_size
        self._windows = windows
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._num_written = np.zeros(num_blocks, dtype=np.int32)  # leading positions whose KV is computed
        self._known = np.zeros(num_blocks, dtype=np.bool_)  # content is known since the last allocation
        self._generation = np.zeros(num_blocks, dtype=np.int64)
        self._parent = np.zeros(num_blocks, dtype=np.int32)
        self._parent_generation = np.zeros(num_blocks, dtype=np.int64)
        self._group = np.zeros(num_blocks, dtype=np.int32)
        self._last_child = np.zeros(num_blocks, dtype=np.int32)  # the last block allocated with it as parent
        self._roots: dict[int, bytes] = {}  # parent hash of blocks without a parent block
        self._external_hashes: dict[int, bytes] = {}  # hash of blocks that no step has filled
        self._media: dict[int, bytes] = {}  # media part of the hash (block_hash.media_of) of blocks that have one

    def allocate(
        self,
        blocks: Blocks,
        parents: Blocks,
        roots: dict[int, bytes],
        groups: Blocks | int = 0,
        *,
        media: Mapping[int, bytes] = NO_MEDIA_PARTS,
    ) -> None:
        """Records blocks newly allocated to sequences as known and empty, with their parents [len(blocks)] and KV
        groups; NO_PARENT for a sequence's first block. `roots`: parent hashes of blocks without a parent block;
        `media`: media parts of the hashes, by block."""
        if self._windows:
            self._record_parent_hashes(blocks)
            self._last_child[parents] = blocks
            for block in blocks[parents == NO_PARENT].tolist():
                self._roots.pop(block, None)  # of an earlier generation
        if self._external_hashes:
            for block in blocks.tolist():
                self._external_hashes.pop(block, None)
        if self._media:
            for block in blocks.tolist():
                self._media.pop(block, None)
        self._media.update(media)
        self._group[blocks] = groups
        self._num_written[blocks] = 0
        self._known[blocks] = True
        self._generation[blocks] += 1
        self._parent[blocks] = parents
        self._parent_generation[blocks] = self._generation[parents]
        self._roots.update(roots)

    def commit(self, blocks: Blocks, names: list[bytes]) -> None:
        """Records blocks that a transfer filled and that no sequence owns yet; `names`: group and hash of each."""
        pages = [page_of(name) for name in names]
        self._generation[blocks] += 1
        self._group[blocks] = [group for group, _ in pages]
        self._parent[blocks] = NO_PARENT
        self._num_written[blocks] = self._block_size
        self._known[blocks] = True
        self._external_hashes.update(zip(blocks.tolist(), (digest for _, digest in pages), strict=True))

    def invalidate(self, blocks: Blocks) -> None:
        """Marks the content of blocks as unknown; with windows, their children first store the parents' hashes."""
        if self._windows:
            self._record_parent_hashes(blocks)
        self._known[blocks] = False
        for block in blocks.tolist():
            self._external_hashes.pop(block, None)

    def record_tokens(self, places: I32, token_ids: I32) -> None:
        """Records that the KV of `token_ids` is computed at `places` (block * block_size + offset), with ascending
        offsets within each block."""
        self._tokens.reshape(-1)[places] = token_ids
        blocks, offsets = np.divmod(places, self._block_size)
        self._num_written[blocks] = offsets + 1  # the last place of each block determines it

    def record_copies(self, sources: Blocks, targets: Blocks) -> None:
        """Records copies of whole blocks; the targets have been allocated. Copies of blocks that a transfer filled
        become unknown, as their tokens are."""
        self._tokens[targets] = self._tokens[sources]
        self._num_written[targets] = self._num_written[sources]
        if self._external_hashes:  # tokens of such blocks are unknown
            self._known[[int(t) for s, t in zip(sources, targets, strict=True) if int(s) in self._external_hashes]] = (
                False
            )

    def reset(self) -> None:
        """Marks the content of all blocks as unknown."""
        self._known[:] = False
        self._external_hashes.clear()

    def are_known(self, blocks: Blocks) -> bool:
        """Returns whether all blocks have been allocated or filled, and not reset since."""
        return bool(self._known[blocks].all())

    def full_blocks(self) -> npt.NDArray[np.bool_]:
        """Returns a mask [num_blocks] of blocks that are full and of known content."""
        full: npt.NDArray[np.bool_] = self._known & (self._num_written == self._block_size)
        full[NO_PARENT] = False
        return full

    def report(self) -> KnownBlocks:
        """Returns the full blocks whose whole hash chain is known, computing the hashes."""
        hashes: dict[int, bytes | None] = {}
        complete = self.full_blocks()
        for block in np.flatnonzero(complete).tolist():
            self._resolve_hashes(block, complete, hashes)
        resolved = [(block, digest) for block, digest in hashes.items() if digest is not None]
        ids = [block for block, _ in resolved]
        return KnownBlocks(ids, b"".join(digest for _, digest in resolved), self._group[ids].tolist())

    def _record_parent_hashes(self, blocks: Blocks) -> None:
        """Stores the hashes of `blocks` in their child blocks before the blocks are reallocated: a sliding window
        releases the front of a sequence first. Children of an incomplete or unknown block stay without a hash."""
        complete = self.full_blocks()
        hashes: dict[int, bytes | None] = {}
        for block in blocks.tolist():
            child = int(self._last_child[block])
            if not child or self._parent[child] != block or self._parent_generation[child] != self._generation[block]:
                continue
            if complete[block]:
                self._resolve_hashes(block, complete, hashes)
            digest = hashes.get(block)
            if digest is not None:
                self._roots[child] = digest
                self._parent[child] = NO_PARENT

    def _resolve_hashes(self, block: int, complete: npt.NDArray[np.bool_], hashes: dict[int, bytes | None]) -> None:
        """Computes the hash of `block` and its ancestors into `hashes`, without recursion; None where an ancestor is
        incomplete, reallocated or without a root hash."""
        pending = []
        while block not in hashes:
            if block in self._external_hashes:
                hashes[block] = self._external_hashes[block]
                break
            pending.append(block)
            parent = int(self._parent[block])
            if parent == NO_PARENT:
                break
            if not complete[parent] or self._generation[parent] != self._parent_generation[block]:
                hashes[block] = None
                break
            block = parent
        for block in reversed(pending):
            if block not in hashes:
                parent = int(self._parent[block])
                parent_hash = self._roots.get(block) if parent == NO_PARENT else hashes[parent]
                tokens, media = self._tokens[block].tobytes(), self._media.get(block, b"")
                hashes[block] = None if parent_hash is None else block_hash(parent_hash, tokens, media)
