"""Changes of a worker's prefix cache since the last publication."""

from __future__ import annotations

from quire.shared.prefix_index.keys import member


class BlockChanges:
    """Net changes: a block that was stored and removed between two publications is not included."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._stored) + len(self._removed)

    def store(self, block_hash: bytes) -> None:
        """Records that a block became cached; cancels a removal that is not published yet."""
        key = member(block_hash)
        if key in self._removed:
            self._removed.discard(key)
        else:
            self._stored.add(key)

    def remove(self, block_hash: bytes) -> None:
        """Records that a block is no longer cached; cancels an addition that is not published yet."""
        key = member(block_hash)
        if key in self._stored:
            self._stored.discard(key)
        else:
            self._removed.add(key)

    def take_changes(self) -> tuple[set[bytes], set[bytes]]:
        """Returns and clears the members (shortened hashes) stored and removed since the last call."""
        changes = self._stored, self._removed
        self._stored, self._removed = set(), set()
        return changes
