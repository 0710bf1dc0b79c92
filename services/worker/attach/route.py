"""Which scheduler to attach to: the one it worked for, the one it was sent to, or another when that stays away."""

from __future__ import annotations

from collections.abc import Sequence

MAX_FAILURES = 4  # failures in a row at one address (1.5 s with the usual pauses) before the others are tried in turn


class Route:
    """Pure: told what happened, says where to go."""

    def __init__(self, configured: Sequence[str]) -> None:
        self._configured = tuple(configured)
        self._peers: tuple[str, ...] = ()
        self.address = self._configured[0]
        self.redirected = False
        self._failures = 0

    @property
    def is_configured(self) -> bool:
        """Whether the settings name the present address; others name it if not."""
        return self.address in self._configured

    def record_welcome(self, peers: Sequence[str]) -> None:
        """Attached; `peers` are the other schedulers."""
        self._peers = tuple(peers)
        self._failures = 0
        self.redirected = False

    def redirect(self, address: str) -> None:
        """A scheduler wants it to work for another."""
        self._peers = (*(peer for peer in self._peers if peer != address), self.address)
        self.address = address
        self.redirected = True
        self._failures = 0

    def record_failure(self) -> None:
        """Could not attach, or was thrown out."""
        self._failures += 1
        self.redirected = False
        known = list(dict.fromkeys([*self._configured, *self._peers, self.address]))
        if self._failures >= MAX_FAILURES:
            self.address = known[(known.index(self.address) + 1) % len(known)]
