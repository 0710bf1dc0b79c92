"""Ranks compute disjoint shares of a call's items, and an error of one of them is an error of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from quire.services.worker.layers.sharding import Collectives, Shard
from quire.services.worker.media.item_shares import ItemShares
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.errors import Internal, QuireError, ResourceExhausted

WIDTH, CPU = 3, torch.device("cpu")
Computed = list[list[bytes]]  # of each rank


class ThreadedCollectives:
    """Collectives of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._values: list[object] = [None] * size

    def exchange(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class RankCollectives:
    """What a rank calls."""

    def __init__(self, shared: ThreadedCollectives, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def min_over_ranks(self, value: int) -> int:
        return min(int(str(one)) for one in self._shared.exchange(self._rank, value))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one for one in self._shared.exchange(self._rank, x) if isinstance(one, torch.Tensor)])


def item(number: int) -> FetchedItem:
    """An item with `number` + 1 rows."""
    return FetchedItem(bytes([number]) * 32, number + 1, (), np.zeros((1, 1, 1, 3), np.uint8))


def rows_of(one: FetchedItem) -> torch.Tensor:
    return torch.full((one.identifier[0] + 1, WIDTH), float(one.identifier[0]))


def on_ranks(
    size: int, items: Sequence[FetchedItem], fails: Callable[[int], QuireError | None] = lambda rank: None
) -> tuple[list[list[torch.Tensor] | QuireError], Computed]:
    """Encodes items on `size` ranks; returns the rows or the error of each, and what each computed."""
    shared = ThreadedCollectives(size)
    found: list[list[torch.Tensor] | QuireError] = [[] for _ in range(size)]
    computed: Computed = [[] for _ in range(size)]

    def run(rank: int) -> None:
        def encode(share: Sequence[FetchedItem]) -> list[torch.Tensor]:
            computed[rank] += [one.identifier for one in share]
            if error := fails(rank):
                raise error
            return [rows_of(one) for one in share]

        collectives: Collectives = RankCollectives(shared, rank)  # type: ignore[assignment]  # those that it calls
        try:
            shares = ItemShares(Shard(rank, size, collectives))
            found[rank] = shares.encode(items, encode, torch.float32, CPU)
        except QuireError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, computed


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_rank_has_all_rows_and_computes_its_share(size: int, count: int) -> None:
    items = [item(number) for number in range(count)]
    found, computed = on_ranks(size, items)
    for rows in found:
        assert not isinstance(rows, QuireError)
        assert len(rows) == count
        assert all(torch.equal(part, rows_of(one)) for part, one in zip(rows, items, strict=True))
    names = sorted(name for share in computed for name in share)
    assert names == sorted(one.identifier for one in items) if count > 1 else len(names) == size
    assert count == 1 or max(map(len, computed)) == -(-count // size)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    full = ResourceExhausted("no memory")
    found, _ = on_ranks(3, [item(number) for number in range(5)], lambda rank: full if rank == 1 else None)
    assert found[1] is full
    assert all(isinstance(found[rank], Internal) for rank in (0, 2))


def test_another_number_of_rows_than_expected_is_an_error_on_all_ranks() -> None:
    found, _ = on_ranks(2, [item(0), item(1)._replace(num_embeddings=9)])
    assert all(isinstance(one, Internal) for one in found)
    (alone,), _ = on_ranks(1, [item(2)._replace(num_embeddings=9)])
    assert not isinstance(alone, QuireError)  # the caller reports it for the item
