"""Choice of the scheduler to dial: the current one, a redirect target, or the next known one after failures."""

from __future__ import annotations

from collections.abc import Sequence

MAX_FAILURES = 4  # in a row at one address (1.5 s with the usual backoff) before the next address is tried


class Route:
    """Chooses the scheduler's address from the outcomes of earlier attempts; performs no I/O."""

    def __init__(self, configured: Sequence[str]) -> None:
        self._configured = tuple(configured)
        self._peers: tuple[str, ...] = ()
        self.address = self._configured[0]
        self.redirected = False
        self._failures = 0

    @property
    def is_configured(self) -> bool:
        """Returns whether the settings name the current address; otherwise another scheduler named it."""
        return self.address in self._configured

    def record_welcome(self, peers: Sequence[str]) -> None:
        """Records a successful attachment; `peers` are the addresses of the other schedulers."""
        self._peers = tuple(peers)
        self._failures = 0
        self.redirected = False

    def redirect(self, address: str) -> None:
        """Switches to `address`, as the current scheduler requested; the current address stays known as a later
        alternative."""
        self._peers = (*(peer for peer in self._peers if peer != address), self.address)
        self.address = address
        self.redirected = True
        self._failures = 0

    def record_failure(self) -> None:
        """Records a failed or ended attachment. From the MAX_FAILURES-th in a row on, each failure switches to the next
        known address, cyclically: configured ones, peers, then the current one."""
        self._failures += 1
        self.redirected = False
        known = list(dict.fromkeys([*self._configured, *self._peers, self.address]))
        if self._failures >= MAX_FAILURES:
            self.address = known[(known.index(self.address) + 1) % len(known)]
