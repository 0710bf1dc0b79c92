"""Reduced sweeps cover every value of every parameter."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from tests.sweeps import FIRST_CASES, FIRST_SLOW_CASES, covering


def test_every_value_occurs_in_few_cases() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = [rng.randrange(1, 7) for _ in range(rng.randrange(1, 5))]
        cases = [
            tuple((f"p{i}", str(v)) for i, v in enumerate(values))
            for values in itertools.product(*map(range, sizes))
            if rng.random() < 0.9
        ]
        kept = covering(cases)
        assert {value for case in cases for value in case} == {value for n in kept for value in cases[n]}
        assert len(kept) <= 2 * max(sizes)
        assert kept == covering(cases)


def test_a_test_of_one_parameter_or_none_is_whole() -> None:
    assert covering([(("p", str(i)),) for i in range(5)]) == set(range(5))
    assert covering([()]) == {0}


def test_what_is_cut_short_exists() -> None:
    for name in (*FIRST_CASES, *FIRST_SLOW_CASES):
        path, _, test = name.partition("::")
        assert f"def {test}(" in Path(__file__).parents[1].joinpath(path).read_text(), name
