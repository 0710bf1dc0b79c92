"""One attachment of an encode worker, which encodes media items for the other workers: the rows that it keeps, and
those that it is computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.encoder_outputs import EncoderOrder
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.replicas.codec import encode_encoder_order
from quire.services.scheduler.replicas.orders import SWAP_TIMEOUT_S, DeviceOrders, weights_of
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ENCODE = "encode"  # WorkerHello.role


@dataclass(slots=True)
class RemoteItem:
    """Media item of an encode worker, from its first user until it is evicted or fails."""

    item: MediaItem
    num_users: int = 0  # other workers that wait for the rows or fetch them
    is_ordered: bool = False  # has room, and the worker has the order to encode it
    is_ready: bool = False


class EncodeWorker:
    """Owns the scheduler's records of one encode worker's rows. Items are ordered as they arrive, within
    the capacity; rows without users stay until others need their memory."""

    def __init__(self, hello: pb.WorkerHello, epoch: int, send: Callable[[pb.AttachResponse], None]) -> None:
        """Nothing is kept yet: a worker drops its rows when an attachment ends. `send`: queues a message without
        blocking."""
        self.hello, self.epoch = hello, epoch
        self.leaving = False
        self.weights = weights_of(hello)
        self.orders = DeviceOrders(send)
        self.num_answers = 0
        self.on_users_changed: Callable[[], None] = lambda: None  # called when fewer workers need its rows
        self.num_rows = 0  # kept or being computed
        self._send = send
        self._items: dict[bytes, RemoteItem] = {}  # least recently used first
        self._unordered: dict[bytes, None] = {}  # in order of arrival

    def __contains__(self, identifier: bytes) -> bool:
        return identifier in self._items

    @property
    def id(self) -> str:
        return self.hello.worker_id

    def is_outdated(self, target: model_pb2.WeightsIdentity) -> bool:
        """Returns whether an update from a folder has changed the encoder since this worker's weights. Other updates
        cannot be brought to it."""
        return bool(target.path) and self.weights.encoder_update != target.encoder_update

    async def update_weights(self, target: model_pb2.WeightsIdentity) -> None:
        """Has the worker load the target weights, once no other worker needs its rows. Raises its QuireError, and
        Unavailable if it does not answer."""
        self.release_unused()
        await self.orders.execute(pb.DeviceOrder(stage_weights=pb.StageWeights(weights=target)))
        swap = pb.DeviceOrder(swap_weights=pb.SwapWeights(update=target.update))
        await self.orders.execute(swap, SWAP_TIMEOUT_S)
        self.weights = target

    @property
    def source(self) -> pb.RowsSource:
        """Address at which other workers find its rows."""
        return pb.RowsSource(worker_id=self.id, address=self.hello.address, epoch=self.epoch)

    @property
    def num_items(self) -> int:
        return len(self._items)

    @property
    def num_users(self) -> int:
        return sum(found.num_users for found in self._items.values())

    @property
    def num_pending_rows(self) -> int:
        """Rows that are not computed yet, those without room included."""
        return sum(found.item.num_embeddings for found in self._items.values() if not found.is_ready)

    @property
    def num_encoding(self) -> int:
        """Items that the worker has been ordered to encode and has not answered."""
        return sum(found.is_ordered and not found.is_ready for found in self._items.values())

    @property
    def num_waiting(self) -> int:
        """Items for which there is no room yet."""
        return len(self._unordered)

    def is_encoding(self, identifier: bytes) -> bool:
        """Returns whether the worker has been ordered to encode this item and has not answered."""
        found = self._items.get(identifier)
        return found is not None and found.is_ordered and not found.is_ready

    def join(self, item: MediaItem) -> bool:
        """Adds a user of an item, which is ordered as soon as there is room. Returns whether its rows are kept."""
        found = self._items.pop(item.identifier, None)
        if found is None:
            found = RemoteItem(item)
            self._unordered[item.identifier] = None
        self._items[item.identifier] = found  # the most recently used one
        found.num_users += 1
        self._order_items()
        return found.is_ready

    def leave(self, identifier: bytes) -> None:
        """Removes a user of an item; an item that has not been ordered is dropped with its last one."""
        found = self._items[identifier]
        found.num_users -= 1
        if not found.num_users and not found.is_ordered:
            del self._items[identifier], self._unordered[identifier]
        self._order_items()
        self.on_users_changed()

    def complete(self, identifier: bytes, *, failed: bool) -> None:
        """Applies the worker's answer to an order to encode; a failed item is forgotten with all of its users. Raises
        FailedPrecondition for an unknown order."""
        if not self.is_encoding(identifier):
            raise FailedPrecondition(f"identifier: the scheduler awaits no media item {identifier.hex()}")
        self.num_answers += 1
        if failed:
            self.num_rows -= self._items.pop(identifier).item.num_embeddings
        else:
            self._items[identifier].is_ready = True
        self._order_items()
        self.on_users_changed()

    def release_unused(self) -> None:
        """Releases all rows without users."""
        for identifier in [name for name, found in self._items.items() if found.is_ready and not found.num_users]:
            self._evict(identifier)

    def check_invariant(self) -> None:
        """Raises AssertionError if sizes, orders and users do not add up."""
        ordered = [found for found in self._items.values() if found.is_ordered]
        assert self.num_rows == sum(found.item.num_embeddings for found in ordered) <= self.hello.encoder.capacity
        assert all(found.is_ordered or found.num_users for found in self._items.values()), "unused items are dropped"
        unordered = {name for name, found in self._items.items() if not found.is_ordered}
        assert unordered == self._unordered.keys()

    def _order_items(self) -> None:
        """Orders items in order of arrival, as far as there is room, which unused rows make."""
        for identifier in list(self._unordered):
            found = self._items[identifier]
            if not self._make_room(found.item.num_embeddings):
                return
            del self._unordered[identifier]
            found.is_ordered = True
            self.num_rows += found.item.num_embeddings
            self._send(encode_encoder_order(EncoderOrder(identifier, found.item)))

    def _make_room(self, num_rows: int) -> bool:
        """Releases unused rows, least recently used first, until `num_rows` more fit; returns whether they do."""
        capacity = self.hello.encoder.capacity
        unused = [name for name, found in self._items.items() if found.is_ready and not found.num_users]
        for identifier in unused:
            if self.num_rows + num_rows <= capacity:
                break
            self._evict(identifier)
        return self.num_rows + num_rows <= capacity

    def _evict(self, identifier: bytes) -> None:
        self.num_rows -= self._items.pop(identifier).item.num_embeddings
        self._send(encode_encoder_order(EncoderOrder(identifier, None)))
