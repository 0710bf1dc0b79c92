"""Adapters that one worker has loaded, and its load orders in progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from quire.shared.errors import FailedPrecondition, QuireError, Unavailable, from_proto
from quire.shared.models import adapter_ids
from quire.shared.models.adapter_ids import DIGEST_BYTES, AdapterId
from quire.shared.pb.worker.v1 import worker_pb2 as pb

Outcome = AdapterId | QuireError  # the loaded adapter, or why the order failed
Done = Callable[[Outcome], None]


class ReplicaAdapters:
    """Adapters of one attachment. Each order ends with one call of its `done`, at the latest when the worker is
    gone."""

    def __init__(
        self, hello: pb.WorkerHello, send: Callable[[pb.AttachResponse], None], count: Callable[[str], None]
    ) -> None:
        """`count`: receives the outcome of each order, one of LOAD_OUTCOMES."""
        self._send, self._count = send, count
        self._order_ids = itertools.count(1)
        self._orders: dict[int, tuple[str, Done]] = {}
        self._is_gone = False
        self.capacity = hello.lora.max_adapters
        self._held = dict.fromkeys(
            adapter_ids.ids(hello.lora.names, hello.lora.digests)
        )  # in order of use, last used last
        self.rejected: set[AdapterId] = set()  # failed adapters, which are not ordered again
        self.reserved: set[AdapterId] = (
            set()
        )  # loaded adapters reserved for their current users: other sequences wait for the slot

    @property
    def can_load(self) -> bool:
        """Whether the worker can load adapters at run time."""
        return self.capacity > 0

    @property
    def loaded(self) -> Collection[AdapterId]:
        """Loaded adapters in order of use, last used last."""
        return self._held.keys()

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken, orders in progress included."""
        return len(self._held) + len(self._orders) >= self.capacity

    def accepts(self, adapter: object) -> bool:
        """Returns whether the worker accepts sequences with this adapter; None: sequences without one."""
        return adapter is None or (adapter in self.loaded and adapter not in self.reserved)

    def mark_used(self, adapter: AdapterId) -> None:
        """Marks an adapter as used, so that it is not the next one to be unloaded."""
        self._held[adapter] = self._held.pop(adapter)

    def load(self, name: str, path: str, done: Done, digest: bytes = b"") -> None:
        """Orders the load of an adapter; `done` is called with the adapter's id or the error, at once if the worker
        is gone. `digest`: required content; empty: any."""
        if self._is_gone:
            done(Unavailable("the worker has disconnected"))
            return
        order_id = next(self._order_ids)
        self._orders[order_id] = name, done
        order = pb.LoadAdapter(order_id=order_id, name=name, path=path, digest=digest)
        self._send(pb.AttachResponse(load_adapter=order))

    def is_loading(self, name: str) -> bool:
        return any(name == ordered for ordered, _ in self._orders.values())

    def receive_loaded(self, wire: pb.AdapterLoaded) -> None:
        """Handles the worker's answer: records the loaded adapter and calls the order's `done` with its id, or with
        the worker's error. Raises FailedPrecondition for an unknown order or a malformed digest."""
        if wire.order_id not in self._orders:
            raise FailedPrecondition(f"order_id: the scheduler awaits no adapter {wire.order_id}")
        if not wire.HasField("error") and len(wire.digest) != DIGEST_BYTES:
            raise FailedPrecondition(f"digest: an adapter's has {DIGEST_BYTES} bytes, not {len(wire.digest)}")
        name, done = self._orders.pop(wire.order_id)
        self._count("refused" if wire.HasField("error") else "loaded")
        if wire.HasField("error"):
            done(from_proto(wire.error))
            return
        adapter = AdapterId(name, wire.digest)
        self._held[adapter] = None
        self.rejected.discard(adapter)
        done(adapter)

    def unload(self, adapter: AdapterId) -> None:
        """Orders the unloading of an adapter, executed after the plans already sent. Does nothing if it is not
        loaded."""
        self.rejected.discard(adapter)
        self.reserved.discard(adapter)
        if adapter in self._held:
            del self._held[adapter]
            self._send(pb.AttachResponse(unload_adapter=pb.UnloadAdapter(name=adapter.name, digest=adapter.digest)))

    def fail_pending(self) -> None:
        """Fails all orders in progress, because the worker has disconnected."""
        self._is_gone = True
        orders, self._orders = self._orders, {}
        for _, done in orders.values():
            self._count("lost")
            done(Unavailable("the worker has disconnected"))
