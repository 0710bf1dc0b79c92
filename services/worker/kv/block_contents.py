"""What the KV blocks hold, by content: reported when the worker attaches, so that a new scheduler finds the cache warm.

A step only notes which tokens went where (a few array writes). Hashes are computed when the report is asked for:
a block's hash needs its own tokens and the hash of the block before it, so each block remembers which one that was, and
which life of it (a block that is handed out anew starts another life).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32
from quire.shared.kv.block_hash import block_hash, page_of

Blocks = npt.NDArray[Any]  # block ids, any integer type

NO_PARENT = 0  # the null block precedes the first block of every sequence


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """Blocks of known content."""

    block_ids: list[int]
    hashes: bytes  # 32 bytes each, same order
    groups: list[int]  # KV group of each, same order


class BlockContents:
    """Arrays are [num_blocks]. Each KV group has chains of its own."""

    def __init__(self, num_blocks: int, block_size: int, *, windows: bool = False) -> None:
        """`windows`: blocks are handed out anew while the blocks behind them stay."""
        self._block_size = block_size
        self._windows = windows
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._num_written = np.zeros(num_blocks, dtype=np.int32)  # leading positions whose KV is computed
        self._known = np.zeros(num_blocks, dtype=np.bool_)  # not forgotten since it was handed out
        self._generation = np.zeros(num_blocks, dtype=np.int64)
        self._parent = np.zeros(num_blocks, dtype=np.int32)
        self._parent_generation = np.zeros(num_blocks, dtype=np.int64)
        self._group = np.zeros(num_blocks, dtype=np.int32)
        self._last_child = np.zeros(num_blocks, dtype=np.int32)  # the last block that was handed out behind it
        self._roots: dict[int, bytes] = {}  # the hash of what comes before, of blocks whose parent is none
        self._external_hashes: dict[int, bytes] = {}  # the hash of what a block holds that no step has filled

    def allocate(self, blocks: Blocks, parents: Blocks, roots: dict[int, bytes], groups: Blocks | int = 0) -> None:
        """`blocks` go to sequences, each behind its parent; `roots`: root hashes of those that have none."""
        if self._windows:
            self._record_parent_hashes(blocks)
            self._last_child[parents] = blocks
            for block in blocks[parents == NO_PARENT].tolist():
                self._roots.pop(block, None)  # of another life
        if self._external_hashes:
            for block in blocks.tolist():
                self._external_hashes.pop(block, None)
        self._group[blocks] = groups
        self._num_written[blocks] = 0
        self._known[blocks] = True
        self._generation[blocks] += 1
        self._parent[blocks] = parents
        self._parent_generation[blocks] = self._generation[parents]
        self._roots.update(roots)

    def commit(self, blocks: Blocks, names: list[bytes]) -> None:
        """They get what they hold from elsewhere; nobody owns them yet."""
        pages = [page_of(name) for name in names]
        self._generation[blocks] += 1
        self._group[blocks] = [group for group, _ in pages]
        self._parent[blocks] = NO_PARENT
        self._num_written[blocks] = self._block_size
        self._known[blocks] = True
        self._external_hashes.update(zip(blocks.tolist(), (digest for _, digest in pages), strict=True))

    def invalidate(self, blocks: Blocks) -> None:
        """Nobody knows what they hold."""
        if self._windows:
            self._record_parent_hashes(blocks)
        self._known[blocks] = False
        for block in blocks.tolist():
            self._external_hashes.pop(block, None)

    def record_tokens(self, places: I32, token_ids: I32) -> None:
        """KV of these tokens has been computed into `places` (block * block_size + offset), offsets ascending."""
        self._tokens.reshape(-1)[places] = token_ids
        blocks, offsets = np.divmod(places, self._block_size)
        self._num_written[blocks] = offsets + 1  # of several places in one block the last one counts

    def record_copies(self, sources: Blocks, targets: Blocks) -> None:
        """KV of whole blocks has been copied; the targets have been handed out."""
        self._tokens[targets] = self._tokens[sources]
        self._num_written[targets] = self._num_written[sources]
        if self._external_hashes:  # whose tokens nobody knows
            self._known[[int(t) for s, t in zip(sources, targets, strict=True) if int(s) in self._external_hashes]] = (
                False
            )

    def reset(self) -> None:
        self._known[:] = False
        self._external_hashes.clear()

    def are_known(self, blocks: Blocks) -> bool:
        """Whether they have been handed out or filled, and not forgotten since."""
        return bool(self._known[blocks].all())

    def full_blocks(self) -> npt.NDArray[np.bool_]:
        """[num_blocks] whether the block is full and its content known."""
        full: npt.NDArray[np.bool_] = self._known & (self._num_written == self._block_size)
        full[NO_PARENT] = False
        return full

    def report(self) -> KnownBlocks:
        """Of the blocks whose whole chain is known."""
        hashes: dict[int, bytes | None] = {}
        complete = self.full_blocks()
        for block in np.flatnonzero(complete).tolist():
            self._resolve_hashes(block, complete, hashes)
        found = [(block, digest) for block, digest in hashes.items() if digest is not None]
        ids = [block for block, _ in found]
        return KnownBlocks(ids, b"".join(digest for _, digest in found), self._group[ids].tolist())

    def _record_parent_hashes(self, blocks: Blocks) -> None:
        """Whoever comes behind one of these remembers its hash: what a window has slid over is taken first."""
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
        """Hashes `block` and those before it; None for a block whose chain is broken."""
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
                before = self._roots.get(block) if parent == NO_PARENT else hashes[parent]
                hashes[block] = None if before is None else block_hash(before, self._tokens[block].tobytes())
