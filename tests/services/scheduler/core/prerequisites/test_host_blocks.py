"""Transfers of blocks between device and host memory, and the sequences that wait for them."""

from __future__ import annotations

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import TierLimits
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.core.transfers.orders import DiskOrder, TransferOrder
from quire.services.scheduler.kv_cache.kv_priority import KVPriority
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.reference_worker import ReferenceWorker

SIZE = 4
LEFT = 3  # blocks of the first prompt that the device still has


class OffloadHarness:
    """A core, its worker, and transfers that are executed on request."""

    def __init__(
        self, num_blocks: int = 17, num_host_blocks: int = 100, num_disk_blocks: int = 0, threshold: int = 0
    ) -> None:
        self.limits = make_limits(
            num_blocks=num_blocks,
            block_size=SIZE,
            enable_prefix_caching=True,
            tiers=TierLimits(num_host_blocks, num_disk_blocks, store_threshold=threshold),
        )
        self.core = Core(self.limits)
        self.worker = ReferenceWorker(self.limits)
        self.on_disk: list[DiskOrder] = []
        self._keys = iter(range(1, 1000))

    def add(self, prompt: list[int], max_tokens: int = 2, **fields: object) -> Sequence:
        sequence = make_sequence(next(self._keys), prompt, max_tokens, SIZE, **fields)
        self.core.add(sequence)
        return sequence

    def step(self) -> bool:
        plan = self.core.schedule(0)
        if plan is not None:
            self.core.apply(self.worker.execute(plan), 0)
        return plan is not None

    def run(self, prompt: list[int], **fields: object) -> Sequence:
        """Runs a sequence alone, with all its transfers."""
        sequence = self.add(prompt, **fields)
        while sequence.status is not SequenceStatus.FINISHED:
            assert self.step() or self.move(), "stuck"
        while self.move():
            pass
        return sequence

    def orders(self) -> list[TransferOrder]:
        """Returns host transfers; disk orders stay pending."""
        assert self.core.host_blocks is not None
        orders = self.core.host_blocks.take_orders()
        self.on_disk += [order for order in orders if isinstance(order, DiskOrder)]
        return [order for order in orders if isinstance(order, TransferOrder)]

    def disk_orders(self, *, to_disk: bool) -> list[DiskOrder]:
        assert not self.orders()
        found = [order for order in self.on_disk if order.to_disk is to_disk]
        self.on_disk = [order for order in self.on_disk if order.to_disk is not to_disk]
        return found

    def load(self) -> TransferOrder:
        """Executes the other transfers; returns the one back to the device."""
        orders = self.orders()
        for order in orders:
            if order.to_host:
                self.finish(order)
        (load,) = (order for order in orders if not order.to_host)
        return load

    def move(self) -> bool:
        orders = self.orders()
        for order in orders:
            self.finish(order)
        waiting, self.on_disk = self.on_disk, []
        for on_disk in waiting:
            self.finish_on_disk(on_disk)
        return bool(orders or waiting)

    def finish_on_disk(self, order: DiskOrder, lost: tuple[int, ...] = ()) -> None:
        self.core.on_transfer_done(order.transfer_id, lost=self.worker.disk_transfer(order, lost))

    def finish(self, order: TransferOrder, *, failed: bool = False) -> None:
        if not failed:
            self.worker.transfer(order)
        self.core.on_transfer_done(order.transfer_id, failed=failed)


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    return [number + 1 for _ in range(num_tokens)]


@pytest.fixture
def full() -> OffloadHarness:
    """The device has evicted most of the first of two prompts; host memory has not."""
    machine = OffloadHarness()
    machine.run(prompt(0))
    machine.run(prompt(1))
    return machine


def test_without_host_memory_there_are_no_transfers() -> None:
    assert OffloadHarness(num_host_blocks=0).core.host_blocks is None


def test_filled_blocks_are_stored_once(full: OffloadHarness) -> None:
    assert full.core.counts.stored_blocks == 20
    full.run(prompt(1))
    assert full.core.counts.stored_blocks == 20
    assert full.core.use.used == 0


def test_a_sequence_waits_for_its_blocks_without_blocking_others(full: OffloadHarness) -> None:
    waiting, other = full.add(prompt(0)), full.add(prompt(7, 8))
    assert full.step()
    assert (waiting.status, other.status) == (SequenceStatus.BLOCKED, SequenceStatus.RUNNING)
    load = full.load()
    assert (len(load.blocks), full.core.num_waiting) == (10 - LEFT, 1)
    full.finish(load)
    full.step()
    assert waiting.status is SequenceStatus.RUNNING
    assert waiting.num_cached_tokens == 40


def test_two_sequences_with_one_prompt_wait_for_one_transfer(full: OffloadHarness) -> None:
    both = [full.add(prompt(0)), full.add(prompt(0))]
    assert not full.step()
    load = full.load()
    full.finish(load)
    assert full.step()
    assert [sequence.status for sequence in both] == [SequenceStatus.RUNNING] * 2
    assert full.core.counts.fetched_blocks == 10 - LEFT


def test_blocks_of_a_failed_transfer_are_computed(full: OffloadHarness) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.finish(load, failed=True)
    assert full.step()
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_cached_tokens == LEFT * SIZE
    assert full.core.counts.failed_transfers == 1


def test_a_sequence_cancelled_while_waiting_is_not_resumed(full: OffloadHarness) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.core.cancel(sequence.key)
    assert full.core.use.used == 10, "the transfer is still in flight"
    full.finish(load)
    assert (full.core.use.used, full.core.num_waiting, full.core.num_waiting_tokens) == (0, 0, 0)
    assert not full.core.has_work


def test_blocked_sequences_are_evacuated_with_waiting_ones(full: OffloadHarness) -> None:
    sequence = full.add(prompt(0))
    full.step()
    assert full.core.evacuate_waiting() == [sequence]
    load = full.load()
    full.finish(load)
    assert not full.core.has_work


def test_sequences_that_skip_the_cache_do_not_read_host_memory(full: OffloadHarness) -> None:
    sequence = full.add(prompt(0), skip_reading_prefix_cache=True)
    full.step()
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_cached_tokens == 0


def test_placement_counts_blocks_in_host_memory(full: OffloadHarness) -> None:
    assert full.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 40
    assert full.core.num_cached(make_sequence(901, prompt(5), 2, SIZE)) == 0


def test_a_reset_waits_for_transfers_and_clears_both_tiers(full: OffloadHarness) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.core.cancel(sequence.key)
    assert full.core.reset_prefix_cache() is None
    full.finish(load)
    assert full.core.reset_prefix_cache() == 10 + 6 + 20, "what came back, what was left of the other, host memory"
    assert full.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 0


HOST = 12  # of them, room for one prompt and a bit


@pytest.fixture
def deep() -> OffloadHarness:
    """The blocks of three prompts are on disk; host memory has the last of them, the device a part of those."""
    machine = OffloadHarness(num_host_blocks=HOST, num_disk_blocks=100)
    for number in range(3):
        machine.run(prompt(number))
    return machine


def test_blocks_in_host_memory_are_written_to_disk(deep: OffloadHarness) -> None:
    assert deep.core.counts.disk_stored_blocks == 30
    assert deep.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 40


def test_blocks_come_back_from_disk_through_host_memory(deep: OffloadHarness) -> None:
    sequence = deep.add(prompt(0))
    assert not deep.step()
    (load,) = deep.disk_orders(to_disk=False)
    assert sequence.status is SequenceStatus.BLOCKED
    assert len(load.hashes) == HOST // 2, "the rest of host memory is for others"
    deep.finish_on_disk(load)
    assert not deep.step()
    (rest,) = deep.disk_orders(to_disk=False)
    deep.finish_on_disk(rest)
    assert not deep.step()
    deep.finish(deep.load())
    deep.step()
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_cached_tokens == 40
    assert deep.core.counts.disk_fetched_blocks == 10


def test_two_sequences_with_one_prompt_wait_for_one_disk_read(deep: OffloadHarness) -> None:
    both = [deep.add(prompt(0)), deep.add(prompt(0))]
    for _ in range(2):
        assert not deep.step()
        (load,) = deep.disk_orders(to_disk=False)
        deep.finish_on_disk(load)
    assert not deep.step()
    deep.finish(deep.load())
    deep.step()
    assert {sequence.num_cached_tokens for sequence in both} == {40}
    assert deep.core.counts.disk_fetched_blocks == 10


def test_blocks_after_a_torn_block_are_computed(deep: OffloadHarness) -> None:
    sequence = deep.add(prompt(0))
    deep.step()
    (load,) = deep.disk_orders(to_disk=False)
    deep.finish_on_disk(load, lost=(3,))
    assert deep.core.counts.disk_lost_blocks == 1
    assert not deep.step()
    again = deep.load()
    assert len(again.hashes) == 3
    deep.finish(again)
    deep.step()
    assert (sequence.status, sequence.num_cached_tokens) == (SequenceStatus.RUNNING, 3 * SIZE)


def test_a_failed_disk_read_is_computed_and_not_repeated(deep: OffloadHarness) -> None:
    sequence = deep.add(prompt(0))
    deep.step()
    (load,) = deep.disk_orders(to_disk=False)
    deep.core.on_transfer_done(load.transfer_id, failed=True)
    assert deep.step()
    assert (sequence.status, sequence.num_cached_tokens) == (SequenceStatus.RUNNING, 0)
    assert all(order.to_host for order in deep.orders())
    assert all(order.to_disk for order in deep.on_disk)


def test_a_disk_that_rejects_writes_delays_no_sequence() -> None:
    machine = OffloadHarness(num_host_blocks=HOST, num_disk_blocks=100)
    sequence = machine.add(prompt(0))
    while sequence.status is not SequenceStatus.FINISHED:
        machine.step()
        for order in machine.orders():
            machine.finish(order)
    for number in range(1, 4):
        sequence = machine.add(prompt(number))
        while sequence.status is not SequenceStatus.FINISHED:
            assert machine.step(), "stuck"
            for order in machine.orders():
                machine.finish(order)
    assert machine.core.counts.disk_stored_blocks == 0
    assert sum(len(order.hashes) for order in machine.on_disk) <= HOST // 4, "no more of host memory waits for it"


def test_a_sequence_cancelled_during_a_disk_read_is_not_resumed(deep: OffloadHarness) -> None:
    sequence = deep.add(prompt(0))
    deep.step()
    (load,) = deep.disk_orders(to_disk=False)
    assert deep.core.num_waiting == 1
    deep.core.cancel(sequence.key)
    deep.finish_on_disk(load)
    assert not deep.core.has_work
    assert deep.core.num_waiting == 0


def test_a_reset_clears_the_disk(deep: OffloadHarness) -> None:
    while deep.move():
        pass
    forgotten = deep.core.reset_prefix_cache()
    assert forgotten is not None
    assert forgotten >= 30 + HOST
    assert deep.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 0


def test_blocks_below_the_threshold_are_not_stored() -> None:
    machine = OffloadHarness(num_blocks=40, threshold=2)
    machine.run(prompt(0))
    assert machine.core.counts.stored_blocks == 0
    machine.run(prompt(0))
    assert machine.core.counts.stored_blocks == 10, "they were still on the device"
    machine.run(prompt(1))
    machine.run(prompt(0))
    assert machine.core.counts.stored_blocks == 10


def test_blocks_recomputed_after_eviction_are_stored() -> None:
    machine = OffloadHarness(threshold=2)
    for number in (0, 1, 2, 0):
        machine.run(prompt(number))
    assert machine.core.counts.stored_blocks == 10


def test_blocks_used_on_the_device_stay_in_host_memory() -> None:
    """The first prompt is used again and again, and never read from host memory."""
    machine = OffloadHarness(num_blocks=40, num_host_blocks=20)
    for number in (0, 1, 0, 2):
        machine.run(prompt(number))
    tier = machine.core.host_blocks.tier if machine.core.host_blocks is not None else None
    assert tier is not None
    kept = [all(map(tier.holds, make_sequence(900, prompt(n), 2, SIZE).block_hashes)) for n in range(3)]
    assert kept == [True, False, True]


@pytest.mark.parametrize("num_disk_blocks", [0, 20])
def test_a_high_priority_prompt_survives_a_flood_of_others(num_disk_blocks: int) -> None:
    machine = OffloadHarness(num_host_blocks=20, num_disk_blocks=num_disk_blocks)
    machine.run(prompt(0), kv_priority=KVPriority.HIGH)
    for number in range(1, 8):
        machine.run(prompt(number))
    assert machine.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) >= 36
    assert machine.core.num_cached(make_sequence(901, prompt(1), 2, SIZE)) == 0


def test_a_high_priority_prompt_is_stored_at_its_first_use() -> None:
    machine = OffloadHarness(threshold=2)
    machine.run(prompt(0), kv_priority=KVPriority.HIGH)
    machine.run(prompt(1))
    assert machine.core.counts.stored_blocks == 10
