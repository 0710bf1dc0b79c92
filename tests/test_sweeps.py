"""Reduced sweeps cover every value of every parameter."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.sweeps import FIRST_CASES, FIRST_SLOW_CASES, SWEEPS, check_slow_files, covering, may_have_slow_tests


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


TESTS = Path(__file__).parent


def test_files_with_slow_tests_are_those_that_name_the_mark_or_are_in_a_table() -> None:
    assert may_have_slow_tests(TESTS / "chaos/test_handover.py")
    assert may_have_slow_tests(TESTS.parent / SWEEPS["slow"][0])
    assert may_have_slow_tests(TESTS / "services/frontend/bounds/test_garbage.py")
    assert not may_have_slow_tests(TESTS / "shared/test_histogram.py")


def test_a_slow_test_that_no_run_of_slow_tests_would_find_is_an_error(request: pytest.FixtureRequest) -> None:
    """Marks this very test through a name, which a search of the file's text does not find."""
    check_slow_files([request.node])
    request.node.add_marker(getattr(pytest.mark, "slow"))  # noqa: B009
    with pytest.raises(pytest.UsageError, match=r"tests/test_sweeps\.py has slow tests"):
        check_slow_files([request.node])
