"""Pages of windows and states below the device: which are stored, and which a start needs."""

from __future__ import annotations

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import TierLimits
from quire.services.scheduler.core.sequences.sequence import SequenceStatus
from quire.services.scheduler.core.transfers.tier_lookup import MultiGroupLookup
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.kv_cache.kv_priority import KVPriority
from quire.shared.kv.block_hash import page_of
from quire.shared.kv.kv_specs import FULL, KVSpec, State, Window
from tests.observing import calls_of
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.core.prerequisites.test_host_blocks import SIZE, OffloadHarness, prompt
from tests.services.scheduler.reference_worker import ReferenceWorker

WINDOWS: tuple[KVSpec, ...] = (FULL, Window(9))
STATES: tuple[KVSpec, ...] = (FULL, State(100))
IN_WINDOW = 3  # blocks of a window of 9 tokens that a start after a whole block needs


class GroupOffloadHarness(OffloadHarness):
    """OffloadHarness for a model with two KV groups."""

    def __init__(self, specs: tuple[KVSpec, ...], num_blocks: int = 34, **tiers: int) -> None:
        super().__init__()
        self.limits = make_limits(
            num_blocks=num_blocks,
            block_size=SIZE,
            enable_prefix_caching=True,
            kv_specs=specs,
            tiers=TierLimits(**({"num_host_blocks": 100} | tiers)),
        )
        self.core, self.worker = Core(self.limits), ReferenceWorker(self.limits)

    @property
    def tier(self) -> BlockTier:
        assert self.core.host_blocks is not None
        return self.core.host_blocks.tier

    def stored(self, tokens: list[int], group: int) -> list[int]:
        """Returns the block positions whose page of that group is in host memory."""
        hashes = make_sequence(900, tokens, 2, SIZE).block_hashes
        held = {page_of(name) for name in self.tier.held()}
        return [position for position, block_hash in enumerate(hashes) if (group, block_hash) in held]


def test_window_pages_needed_after_the_prompt_are_stored() -> None:
    machine = GroupOffloadHarness(WINDOWS)
    machine.run(prompt(0))
    assert machine.stored(prompt(0), 0) == [*range(10)]
    assert machine.stored(prompt(0), 1) == [*range(10 - IN_WINDOW, 10)]


def test_state_pages_needed_by_the_same_prompt_are_stored() -> None:
    machine = GroupOffloadHarness(STATES)
    machine.run(prompt(0))
    assert machine.stored(prompt(0), 1) == [8, 9], "after the last block, and before it, if the same prompt comes again"


@pytest.mark.parametrize("specs", [WINDOWS, STATES])
def test_sequences_can_continue_after_a_finished_answer(specs: tuple[KVSpec, ...]) -> None:
    machine = GroupOffloadHarness(specs)
    sequence = machine.run(prompt(0), max_tokens=22)
    said = sequence.tokens.ids()
    assert len(said) == 62
    assert machine.stored(said, 1)[-1] == 14, "15 blocks are full, and known"
    for number in range(1, 4):
        machine.run(prompt(number))
    again = machine.run([*said, 7])
    assert again.num_cached_tokens == 60


def test_pages_at_the_divergence_of_prompts_are_stored() -> None:
    machine = GroupOffloadHarness(WINDOWS)
    head = prompt(0, 24)
    machine.run([*head, *prompt(1, 16)])
    assert machine.stored(head, 1) == []
    flood(machine)
    second = machine.run([*head, *prompt(2, 16)])
    assert second.num_cached_tokens == 0, "the window's pages were gone"
    assert machine.stored(head, 1) == [*range(6 - IN_WINDOW, 6)]
    flood(machine)
    assert machine.run([*head, *prompt(3, 16)]).num_cached_tokens == 24


def flood(machine: OffloadHarness) -> None:
    for number in range(20, 24):
        machine.run(prompt(number))


def test_pages_on_the_device_are_not_fetched() -> None:
    """The tail of the full group is evicted, and all pages of the window."""
    machine = GroupOffloadHarness(WINDOWS)
    machine.run(prompt(0))
    machine.run(prompt(1))
    hashes = make_sequence(900, prompt(0), 2, SIZE).block_hashes
    there = [block_hash for block_hash in hashes if machine.core.kv.pool.find(block_hash) is not None]
    assert 0 < len(there) < 10
    before = machine.core.counts.fetched_blocks
    sequence = machine.run(prompt(0))
    assert sequence.num_cached_tokens == 40
    assert machine.core.counts.fetched_blocks - before <= 10 - len(there) + IN_WINDOW


def test_a_failed_window_transfer_is_computed() -> None:
    machine = GroupOffloadHarness(WINDOWS)
    machine.run(prompt(0))
    flood(machine)
    sequence = machine.add(prompt(0))
    machine.step()
    assert sequence.status is SequenceStatus.BLOCKED
    machine.finish(machine.load(), failed=True)
    assert machine.step()
    assert (sequence.status, sequence.num_cached_tokens) == (SequenceStatus.RUNNING, 0)
    while machine.step() or machine.move():
        pass
    assert machine.core.use.used == 0


@pytest.mark.parametrize("specs", [WINDOWS, STATES])
def test_a_high_priority_prompt_survives_a_flood_in_all_groups(specs: tuple[KVSpec, ...]) -> None:
    machine = GroupOffloadHarness(specs, num_host_blocks=30)
    machine.run(prompt(0), kv_priority=KVPriority.HIGH)
    for number in range(1, 8):
        machine.run(prompt(number))
    assert machine.core.num_cached(make_sequence(900, prompt(0), 2, SIZE)) >= 36
    assert machine.core.num_cached(make_sequence(901, prompt(1), 2, SIZE)) == 0


@pytest.mark.parametrize("specs", [WINDOWS, STATES])
def test_blocks_below_the_threshold_are_not_stored_in_any_group(specs: tuple[KVSpec, ...]) -> None:
    machine = GroupOffloadHarness(specs, num_blocks=80, store_threshold=2)
    machine.run(prompt(0))
    assert machine.core.counts.stored_blocks == 0
    machine.run(prompt(0))
    assert machine.stored(prompt(0), 0) == [*range(10)], "they were still on the device"
    assert {8, 9} <= set(machine.stored(prompt(0), 1))


def test_starts_that_cannot_fit_are_skipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation has many restart points, and each lookup walks over all of it, on the event loop."""
    machine = GroupOffloadHarness(WINDOWS, num_blocks=200, num_host_blocks=12, num_disk_blocks=800)
    tokens = [*range(240)]
    for length in range(12, 241, SIZE):
        machine.run(tokens[:length])
    for number in range(20, 50):
        machine.run(prompt(number))
    assert machine.core.num_cached(make_sequence(900, tokens, 2, SIZE)) == 240
    with calls_of(MultiGroupLookup.num_following) as looks:
        sequence = machine.add(tokens)
        machine.step()
    assert sequence.status is SequenceStatus.BLOCKED
    assert len(looks) <= 10, looks
    while machine.step() or machine.move():
        pass
    assert sequence.num_cached_tokens == 36, "9 blocks, and 3 of the window"


def test_a_start_too_large_for_host_memory_falls_back_to_an_earlier_one() -> None:
    """The disk has all pages of a long prompt, and of the shorter ones that it continues."""
    machine = GroupOffloadHarness(WINDOWS, num_blocks=80, num_host_blocks=12, num_disk_blocks=400)
    tokens = [*range(80)]
    for length in (32, 48, 64, 80):
        machine.run(tokens[:length])
    for number in range(20, 30):
        machine.run(prompt(number))
    assert machine.core.num_cached(make_sequence(900, tokens, 2, SIZE)) == 80
    assert machine.run(tokens).num_cached_tokens == 32, "8 blocks, and 3 of the window"
