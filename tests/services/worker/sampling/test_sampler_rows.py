"""Bindings prepared for the rows of a step are reused while the same sequences sample."""

from __future__ import annotations

import numpy as np
import torch

from quire import kernels
from quire.services.worker.sampling.sampler import PlainRows, Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.observing import calls_of


def sampler_of(*slots: int) -> Sampler:
    """Returns a sampler whose slots have their numbers as seeds."""
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


def test_equal_rows_in_another_array_are_compared_once() -> None:
    """A prompt's step and the decode steps after it pass the same slots in two arrays."""
    sampler, of_prompt, of_decode = sampler_of(0, 3), np.array([0, 3]), np.array([0, 3])
    first = plain(sampler, of_prompt)
    assert plain(sampler, of_decode).choice is first.choice
    with calls_of(np.array_equal) as comparisons:
        assert plain(sampler, of_decode).choice is first.choice
        assert not comparisons
        plain(sampler, of_prompt)
        assert len(comparisons) == 1


def test_admissions_invalidate_prepared_rows() -> None:
    sampler, slots = sampler_of(0, 3), np.array([0, 3])
    before = plain(sampler, slots)
    sampler.release(3)
    admit(sampler, 3, seed=99)
    after = plain(sampler, slots)
    assert before.choice.seeds.tolist() == [0, 3]
    assert after.choice.seeds.tolist() == [0, 99]


def test_different_rows_are_prepared_separately() -> None:
    sampler, both, one = sampler_of(0, 3), np.array([0, 3]), np.array([3])
    assert [plain(sampler, slots).choice.seeds.tolist() for slots in (both, one, both)] == [[0, 3], [3], [0, 3]]
