"""Reduced sweeps cover every value of every parameter."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps import (
    BUDGET_S,
    COST_OF_A_CASE_S,
    FIRST_CASES,
    FIRST_SLOW_CASES,
    SWEEPS,
    check_slow_files,
    covering,
    mark_above_budget,
    may_have_slow_tests,
    spread,
)


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
    for name in (*FIRST_CASES, *FIRST_SLOW_CASES, *COST_OF_A_CASE_S):
        path, _, test = name.partition("::")
        assert f"def {test}(" in Path(__file__).parents[1].joinpath(path).read_text(), name


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 1), (49, 5), (7, 3), (3, 9), (126, 4)])
def test_as_many_cases_stay_as_asked_for_and_not_the_same_of_every_test(count: int, kept: int) -> None:
    by_test = [spread(f"tests/test_a.py::test_{number}", count, kept) for number in range(40)]
    assert {len(found) for found in by_test} == {min(count, kept)}
    assert len(set[int]().union(*by_test)) == count or len(set[int]().union(*by_test)) > 10 * kept
    assert by_test[0] == spread("tests/test_a.py::test_0", count, kept)


class ListedItem:
    """Case of a test with marks."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, list(marks)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_cases_above_the_budget_are_slow() -> None:
    costly, cheap = "tests/test_a.py::test_costly", "tests/test_a.py::test_cheap"
    items: list[Any] = [
        *(ListedItem(f"{costly}[{number}]", *(["gpu"] if number == 2 else [])) for number in range(9)),
        *(ListedItem(f"{cheap}[{number}]") for number in range(9)),
    ]
    mark_above_budget(items, {costly: BUDGET_S / 3})
    of_costly = [item for item in items if item.nodeid.startswith(costly)]
    assert [item.marks for item in items if item not in of_costly] == [[]] * 9
    assert of_costly[2].marks == ["gpu"]
    assert sorted(len(item.marks) for item in of_costly) == [0] * 3 + [1] * 6
    assert sum(item.marks == ["slow"] for item in of_costly) == 5


def test_a_case_that_is_more_than_the_budget_stays() -> None:
    items: list[Any] = [ListedItem(f"tests/test_a.py::test_costly[{number}]") for number in range(2)]
    mark_above_budget(items, {"tests/test_a.py::test_costly": 9 * BUDGET_S})
    assert sorted(len(item.marks) for item in items) == [0, 1]


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
