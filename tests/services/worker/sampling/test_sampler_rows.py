"""What is prepared for the rows of a step serves those behind it, as long as the same sequences sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire import kernels
from quire.services.worker.sampling.sampler import PlainRows, Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2


def sampler_of(*slots: int) -> Sampler:
    """Their seeds are their numbers."""
    sampler = Sampler(6, 12, 0, kernels.load("cpu", ()), torch.device("cpu"))
    for slot in slots:
        admit(sampler, slot, seed=slot)
    return sampler


def admit(sampler: Sampler, slot: int, seed: int) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.5, seed=seed)
    sampler.admit(slot, SlotAdmission(token_ids=columns.i32_bytes([0]), num_prompt_tokens=1, sampling=sampling))


def plain(sampler: Sampler, slots: Rows) -> PlainRows:
    found = sampler.plain(slots)
    assert found is not None
    return found


def test_rows_that_another_array_named_first_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's step and the decode steps behind it name the same slots by two arrays."""
    sampler, of_prompt, of_decode = sampler_of(0, 3), np.array([0, 3]), np.array([0, 3])
    first = plain(sampler, of_prompt)
    assert plain(sampler, of_decode).choice is first.choice

    def compare(*arrays: object) -> bool:
        raise AssertionError("compared again")

    monkeypatch.setattr(np, "array_equal", compare)
    assert plain(sampler, of_decode).choice is first.choice
    with pytest.raises(AssertionError, match="compared again"):
        plain(sampler, of_prompt)


def test_an_array_that_served_before_others_were_admitted_is_prepared_again() -> None:
    sampler, slots = sampler_of(0, 3), np.array([0, 3])
    before = plain(sampler, slots)
    sampler.release(3)
    admit(sampler, 3, seed=99)
    after = plain(sampler, slots)
    assert before.choice.seeds.tolist() == [0, 3]
    assert after.choice.seeds.tolist() == [0, 99]


def test_other_rows_between_are_not_taken_for_the_ones_before() -> None:
    sampler, both, one = sampler_of(0, 3), np.array([0, 3]), np.array([3])
    assert [plain(sampler, slots).choice.seeds.tolist() for slots in (both, one, both)] == [[0, 3], [3], [0, 3]]
