"""Fetched media items that wait for the encoder."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.services.worker.step.fetched_item import Fetched, FetchedItem
from quire.shared.errors import QuireError

# Pixels of one call of the encoder, so that a step is delayed by about 10 ms: nine pictures of 336 x 336 pixels, for
# which the tower of LLaVA 1.5 computes 3.5 TFLOP. A larger item is encoded alone.
MOST_PIXELS = 1 << 20


class FetchedOrder(NamedTuple):
    """Order of an attachment whose pixels or rows have arrived."""

    receiver: Any  # the attachment
    item: Fetched
    finish: Callable[[QuireError | None], None]  # called once on the event loop, unless the attachment has ended
    num_releases: int = 0  # orders to release rows that the worker had received before this one, since its start


class WaitingMedia:
    """Queue between the event loop, which fetches, and the device thread, which encodes."""

    def __init__(self, most_items: int = 0) -> None:
        """Creates an empty queue. `most_items`: items of one call of the encoder; 0: as MOST_PIXELS allows."""
        self._orders: deque[FetchedOrder] = deque()
        self._is_announced = False  # a command to encode is queued
        self._lock = threading.Lock()
        self._most_items = most_items

    def put(self, order: FetchedOrder) -> bool:
        """Queues an order; returns whether the device thread has to be given a command to encode."""
        with self._lock:
            self._orders.append(order)
            was_announced, self._is_announced = self._is_announced, True
            return not was_announced

    def take_batch(self, is_current: Callable[[Any], bool], num_releases: int = 0) -> tuple[list[FetchedOrder], bool]:
        """Returns the next orders for one call of the encoder, of equal shape, and whether none is left; otherwise the
        caller has to call again. `is_current`: whether an attachment has not ended; orders of others are dropped.
        `num_releases`: releases that are done; orders that came after further ones wait, because they need the room
        that these free."""
        with self._lock:
            batch: list[FetchedOrder] = []
            others: deque[FetchedOrder] = deque()
            for order in self._orders:
                if is_current(order.receiver):
                    is_taken = order.num_releases <= num_releases and self._fits(batch, order)
                    (batch if is_taken else others).append(order)
            self._orders = others
            self._is_announced = bool(others)
            return batch, not others

    def _fits(self, batch: list[FetchedOrder], order: FetchedOrder) -> bool:
        """Returns whether an order may be encoded together with those of `batch`."""
        if not batch:
            return True
        item, first = order.item, batch[0].item
        if not isinstance(item, FetchedItem) or not isinstance(first, FetchedItem):
            return False  # rows are copied one item at a time
        pixels = item.pixels
        if pixels.shape != first.pixels.shape:
            return False
        count = len(batch) + 1
        return count * math.prod(pixels.shape[:3]) <= MOST_PIXELS and not 0 < self._most_items < count
