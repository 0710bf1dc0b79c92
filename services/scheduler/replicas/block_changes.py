"""What changed in a worker's prefix cache since it was last published."""

from __future__ import annotations

from quire.shared.prefix_index.keys import member


class BlockChanges:
    """Net effect only: a block that came and went between two publications is not mentioned."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._stored) + len(self._removed)

    def store(self, block_hash: bytes) -> None:
        key = member(block_hash)
        if key in self._removed:
            self._removed.discard(key)
        else:
            self._stored.add(key)

    def remove(self, block_hash: bytes) -> None:
        key = member(block_hash)
        if key in self._stored:
            self._stored.discard(key)
        else:
            self._removed.add(key)

    def take(self) -> tuple[set[bytes], set[bytes]]:
        """(stored, removed); forgotten here."""
        taken = self._stored, self._removed
        self._stored, self._removed = set(), set()
        return taken
