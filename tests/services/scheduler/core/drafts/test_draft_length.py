"""Draft lengths settle where they pay, for several kinds of devices, and cost little where none pays."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from quire.services.scheduler.core.drafts.length import DraftLengthTuner

MOST = 6


@dataclass
class Device:
    """Step time in milliseconds: a floor up to which tokens are free, a cost per further token, and a cost per
    draft."""

    floor: float
    per_token: float
    per_draft: float
    right: float  # chance of a draft to be right whose predecessors are
    noise: float = 0.05
    seed: int = 0
    finds: float = 1.0  # share of steps in which there is anything to draft
    drafted: float = 0.0  # what such a step costs more, however long the drafts are

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def step_ms(self, num_sequences: int, length: int) -> float:
        drafted = self.drafted + self.per_draft * length if length else 0.0
        return max(self.floor, self.per_token * num_sequences * (1 + length)) + drafted

    def speed(self, num_sequences: int, length: int) -> float:
        found = self.finds if length else 0.0
        tokens = num_sequences * (1 + found * sum(self.right**i for i in range(1, length + 1)))
        ms = found * self.step_ms(num_sequences, length) + (1 - found) * self.step_ms(num_sequences, 0)
        return tokens / ms

    def best(self, num_sequences: int) -> int:
        return max(range(MOST + 1), key=lambda length: self.speed(num_sequences, length))

    def run(self, lengths: DraftLengthTuner, num_sequences: int, steps: int) -> float:
        """Runs steps; returns tokens per millisecond."""
        total = tokens = 0.0
        for _ in range(steps):
            length = lengths.choose(num_sequences)
            found = self.random.random() < self.finds and length > 0
            accepted = [self._accepted(length if found else 0) for _ in range(num_sequences)]
            usual = self.step_ms(num_sequences, length if found else 0)
            ms = usual * self.random.uniform(1, 1 + 2 * self.noise)
            ms *= 20 if self.random.random() < 0.02 else 1  # something else had the machine
            if found:
                lengths.observe_accepted(np.array(accepted), length)
            elif length:
                lengths.observe_no_drafts(num_sequences, length)
            lengths.observe(num_sequences, length, ms / 1000, alone=True, drafted=found)
            total += min(ms, 2 * usual)
            tokens += num_sequences + sum(accepted)
        return tokens / total

    def _accepted(self, length: int) -> int:
        accepted = 0
        while accepted < length and self.random.random() < self.right:
            accepted += 1
        return accepted


def usual(device: Device, lengths: DraftLengthTuner, num_sequences: int) -> int:
    """Returns the length of most steps: single ones may be trials."""
    chosen: Counter[int] = Counter()
    for _ in range(99):
        device.run(lengths, num_sequences, 1)
        chosen[lengths.choose(num_sequences)] += 1
    return chosen.most_common(1)[0][0]


DEVICES = {
    "a large GPU": Device(floor=8, per_token=0.02, per_draft=0.1, right=0.7),
    "a CPU": Device(floor=0.1, per_token=0.1, per_draft=0.02, right=0.9),
    "a dear drafter": Device(floor=5, per_token=0.05, per_draft=4, right=0.8),
    "wrong drafts": Device(floor=3, per_token=0.05, per_draft=0.2, right=0.05),
    "dear launches": Device(floor=0.5, per_token=0.002, per_draft=0.5, right=0.9, drafted=8, finds=0.4),
}


@pytest.mark.parametrize("num_sequences", [1, 8, 100, 256])
@pytest.mark.parametrize("device", DEVICES)
def test_the_tuner_settles_near_the_best_length(device: str, num_sequences: int) -> None:
    costs, lengths = replace(DEVICES[device]), DraftLengthTuner(MOST)
    costs.run(lengths, num_sequences, 1500)
    reached = costs.speed(num_sequences, usual(costs, lengths, num_sequences))
    assert reached > 0.93 * costs.speed(num_sequences, costs.best(num_sequences))


@pytest.mark.parametrize(("device", "steps"), [(name, 10_000 if name == "dear launches" else 3000) for name in DEVICES])
def test_trials_cost_less_than_two_percent_under_full_load(device: str, steps: int) -> None:
    """A single trial of drafts that cost twenty steps is 2 % of a few thousand steps."""
    costs = DEVICES[device]
    costs = replace(costs, per_token=max(costs.per_token, costs.floor / 256), right=0.3, noise=0.0)
    assert costs.best(256) == 0
    off = costs.run(DraftLengthTuner(0), 256, steps)
    on = costs.run(DraftLengthTuner(MOST), 256, steps)
    assert on > 0.98 * off


def test_lengths_are_kept_per_size_class() -> None:
    costs, lengths = replace(DEVICES["a large GPU"]), DraftLengthTuner(MOST)
    for num_sequences in (2, 400):
        costs.run(lengths, num_sequences, 1200)
    few, many = usual(costs, lengths, 2), usual(costs, lengths, 400)
    assert few >= 4
    assert many <= 1


def test_a_rejected_trial_is_not_repeated_after_a_small_change_of_load() -> None:
    device, lengths = replace(DEVICES["dear launches"], noise=0.0), DraftLengthTuner(MOST)
    device.run(lengths, 256, 50)
    tried = [lengths.choose(255)]
    for _ in range(40):
        device.run(lengths, 255, 1)
        tried.append(lengths.choose(255))
    assert set(tried) == {0}


def test_the_end_of_a_burst_keeps_its_length_unless_more_is_known() -> None:
    device, lengths = replace(DEVICES["dear launches"], noise=0.0), DraftLengthTuner(MOST)
    device.run(lengths, 1, 3)  # the first one
    assert lengths.choose(1) == MOST
    for num_sequences in (256, 60, 9, 1):
        device.run(lengths, num_sequences, 50)
    assert lengths.choose(1) < MOST
    device.run(lengths, 1, 2000)
    alone = lengths.choose(1)
    for num_sequences in (256, 60, 9):
        device.run(lengths, num_sequences, 50)
    assert lengths.choose(1) == alone


def test_fluctuation_around_a_power_of_two_does_not_end_every_trial() -> None:
    costs, lengths = replace(DEVICES["a large GPU"], noise=0.0), DraftLengthTuner(MOST)
    for _ in range(400):
        for num_sequences, steps in ((64, 4), (63, 1), (65, 2), (60, 1)):
            costs.run(lengths, num_sequences, steps)
    assert costs.speed(64, usual(costs, lengths, 64)) > 0.93 * costs.speed(64, costs.best(64))


@pytest.mark.parametrize(("right", "per_draft"), [(0.05, 2.2), (0.15, 4.5)])
def test_trials_cost_less_than_two_percent_with_noisy_step_times(right: float, per_draft: float) -> None:
    """A shared CPU, with drafts that cost a few percent more than they gain."""
    costs = Device(floor=20, per_token=0.0, per_draft=per_draft, right=right, noise=0.3)
    assert costs.best(64) == 0
    assert costs.speed(64, 1) > 0.93 * costs.speed(64, 0)
    on, off = (sum(costs.run(DraftLengthTuner(most), 64, 3000) for _ in range(6)) for most in (MOST, 0))
    assert on > 0.98 * off


def test_drafting_ends_when_drafts_are_rejected() -> None:
    costs, lengths = Device(floor=8, per_token=0.0, per_draft=0.0, drafted=1.5, right=0.9), DraftLengthTuner(MOST)
    costs.run(lengths, 64, 1500)
    assert lengths.choose(64) == MOST
    costs.right = 0.02
    costs.run(lengths, 64, 8000)
    assert costs.run(lengths, 64, 2000) > 0.97 * costs.speed(64, 0) / (1 + costs.noise)


def test_a_fixed_length_stays() -> None:
    lengths = DraftLengthTuner(MOST, fixed=True)
    DEVICES["wrong drafts"].run(lengths, 64, 500)
    assert lengths.choose(64) == MOST


def begin_try(lengths: DraftLengthTuner, num_sequences: int, ms: float) -> None:
    for _ in range(60):
        if lengths.choose(num_sequences):
            return
        lengths.observe(num_sequences, 0, ms / 1000, alone=True, drafted=False)
    raise AssertionError("nothing is tried")


def test_a_trial_among_mixed_steps_is_postponed() -> None:
    """A step may be slow because of its prompts or because of its drafts."""
    lengths = DraftLengthTuner(MOST)
    begin_try(lengths, 256, 1.0)
    for number in range(3):
        assert lengths.choose(256) > 0, number
        lengths.observe(256, lengths.choose(256), 0.04, alone=False, drafted=True)
    assert lengths.choose(256) == 0
    for _ in range(8 * 3 * 40 - 40):
        lengths.observe(256, 0, 0.001, alone=True, drafted=False)
        assert lengths.choose(256) == 0
    begin_try(lengths, 256, 1.0)


def test_a_trial_awaits_its_first_result_and_the_one_after_a_slow_step() -> None:
    lengths = DraftLengthTuner(MOST)
    begin_try(lengths, 256, 1.0)
    assert lengths.awaits_trial_result  # nothing is known yet
    lengths.observe(256, lengths.choose(256), 0.001, alone=True, drafted=True)
    assert not lengths.awaits_trial_result
    lengths.observe(256, lengths.choose(256), 0.04, alone=True, drafted=True)
    assert lengths.awaits_trial_result
    lengths.observe(256, lengths.choose(256), 0.04, alone=True, drafted=True)
    assert (lengths.choose(256), lengths.awaits_trial_result) == (0, False)


def test_mixed_steps_are_not_measured() -> None:
    lengths = DraftLengthTuner(MOST)
    for _ in range(1000):
        lengths.observe(4, lengths.choose(4), 1.0, alone=False, drafted=True)
    assert lengths.choose(4) == MOST


def test_trials_cost_less_than_two_percent_in_bursts_on_a_fast_device() -> None:
    """Steps of 1.25 ms, or 8 ms with drafts, and bursts of one second with varying numbers of sequences: a trial must
    end after a few steps."""
    device = replace(DEVICES["dear launches"], floor=1.25, per_token=0.005, drafted=7, right=0.65, finds=1.0, noise=0.2)
    on, off = (bursts(replace(device), DraftLengthTuner(most)) for most in (MOST, 0))
    assert on > 0.98 * off


def bursts(device: Device, lengths: DraftLengthTuner) -> float:
    """Returns tokens per millisecond, without the first bursts."""
    tokens = total = 0.0
    for number in range(15):
        for num_sequences, steps in ((64, 2), (128, 3), (256, 505), (200, 4), (60, 4), (10, 3)):
            speed = device.run(lengths, num_sequences, steps)
            if number >= 2:
                tokens += num_sequences * steps
                total += num_sequences * steps / speed
    return tokens / total
