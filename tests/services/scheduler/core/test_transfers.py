"""Blocks that move between device and host memory: who waits for them, and who does not."""

from __future__ import annotations

import pytest

from services.scheduler.core.core import Core
from services.scheduler.core.sequence import Sequence, SequenceStatus
from services.scheduler.core.transfers import TransferOrder
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.paper_worker import PaperWorker

SIZE = 4
LEFT = 3  # blocks of the first prompt that the device still has


class Machine:
    """A core, its worker, and transfers that are done when they are asked for."""

    def __init__(self, num_blocks: int = 17, num_host_blocks: int = 100) -> None:
        self.limits = make_limits(
            num_blocks=num_blocks, block_size=SIZE, enable_prefix_caching=True, num_host_blocks=num_host_blocks
        )
        self.core = Core(self.limits)
        self.worker = PaperWorker(self.limits)
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

    def run(self, prompt: list[int]) -> Sequence:
        """Alone, with all its transfers."""
        sequence = self.add(prompt)
        while sequence.status is not SequenceStatus.FINISHED:
            assert self.step() or self.move(), "stuck"
        while self.move():
            pass
        return sequence

    def orders(self) -> list[TransferOrder]:
        assert self.core.transfers is not None
        return self.core.transfers.take_orders()

    def load(self) -> TransferOrder:
        """The one back to the device; others are done."""
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
        return bool(orders)

    def finish(self, order: TransferOrder, *, failed: bool = False) -> None:
        if not failed:
            self.worker.transfer(order)
        self.core.transferred(order.transfer_id, failed=failed)


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    return [number + 1 for _ in range(num_tokens)]


@pytest.fixture
def full() -> Machine:
    """The device has forgotten most of the first of two prompts, host memory has not."""
    machine = Machine()
    machine.run(prompt(0))
    machine.run(prompt(1))
    return machine


def test_without_host_memory_there_is_nothing_of_it() -> None:
    assert Machine(num_host_blocks=0).core.transfers is None


def test_what_a_step_fills_is_stored_once(full: Machine) -> None:
    assert full.core.counts.stored_blocks == 20
    full.run(prompt(1))
    assert full.core.counts.stored_blocks == 20
    assert full.core.use.used == 0


def test_a_sequence_waits_for_its_blocks_and_nobody_waits_behind_it(full: Machine) -> None:
    waiting, other = full.add(prompt(0)), full.add(prompt(7, 8))
    assert full.step()
    assert (waiting.status, other.status) == (SequenceStatus.BLOCKED, SequenceStatus.RUNNING)
    load = full.load()
    assert (len(load.blocks), full.core.num_waiting) == (10 - LEFT, 1)
    full.finish(load)
    full.step()
    assert waiting.status is SequenceStatus.RUNNING
    assert waiting.num_cached_tokens == 40


def test_two_with_one_prompt_wait_for_one_transfer(full: Machine) -> None:
    both = [full.add(prompt(0)), full.add(prompt(0))]
    assert not full.step()
    load = full.load()
    full.finish(load)
    assert full.step()
    assert [sequence.status for sequence in both] == [SequenceStatus.RUNNING] * 2
    assert full.core.counts.fetched_blocks == 10 - LEFT


def test_what_cannot_be_moved_is_computed(full: Machine) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.finish(load, failed=True)
    assert full.step()
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_cached_tokens == LEFT * SIZE
    assert full.core.counts.failed_transfers == 1


def test_whoever_leaves_meanwhile_is_not_waited_for(full: Machine) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.core.cancel(sequence.key)
    assert full.core.use.used == 10, "the transfer is still under way"
    full.finish(load)
    assert (full.core.use.used, full.core.num_waiting, full.core.num_waiting_tokens) == (0, 0, 0)
    assert not full.core.has_work


def test_blocked_sequences_leave_with_those_that_wait(full: Machine) -> None:
    sequence = full.add(prompt(0))
    full.step()
    assert full.core.evacuate_waiting() == [sequence]
    load = full.load()
    full.finish(load)
    assert not full.core.has_work


def test_who_must_not_read_the_cache_does_not_read_host_memory(full: Machine) -> None:
    sequence = full.add(prompt(0), skip_reading_prefix_cache=True)
    full.step()
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_cached_tokens == 0


def test_a_worker_counts_for_what_its_host_memory_holds(full: Machine) -> None:
    assert full.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 40
    assert full.core.num_cached(make_sequence(901, prompt(5), 2, SIZE)) == 0


def test_a_reset_waits_for_transfers_and_forgets_both(full: Machine) -> None:
    sequence = full.add(prompt(0))
    full.step()
    load = full.load()
    full.core.cancel(sequence.key)
    assert full.core.reset_prefix_cache() is None
    full.finish(load)
    assert full.core.reset_prefix_cache() == 10 + 6 + 20, "what came back, what was left of the other, host memory"
    assert full.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) == 0
