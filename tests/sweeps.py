"""Sweeps over many parameters, thinned: of a product of parameters, enough cases that each value of each occurs.

`make test` runs these; `make test-all` runs every case. A test with one parameter keeps all its cases, and so does
whatever lies outside SWEEPS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Where products are large and each case is slow: kernels in Triton's interpreter, models against transformers, and
# every method of drafting with every parameter.
SWEEPS = (
    "tests/kernels/triton/",
    "tests/kernels/cpu/test_build.py",
    "tests/kernels/test_reference_attention.py",
    "tests/batch_invariance/",
    "tests/services/worker/runner/test_batch_invariance.py",
    "tests/services/worker/models/test_logits.py",
    "tests/services/worker/sampling/test_sampler_distribution.py",
    "tests/services/worker/models/test_recorded_kernels.py",
    "tests/spec_decode/test_same_text.py",
)

Case = tuple[tuple[str, str], ...]  # (parameter, value) of a test


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Those that nothing new occurs in get the mark `sweep`."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid.startswith(SWEEPS):
            by_test[item.nodeid.partition("[")[0]].append(item)
    for same in by_test.values():
        kept = covering([case_of(item) for item in same])
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker(pytest.mark.sweep)


def case_of(item: Any) -> Case:
    """By the parameters' ids, so that values need not be hashable."""
    spec = getattr(item, "callspec", None)
    return tuple(sorted((name, repr(value)) for name, value in spec.params.items())) if spec else ()


def covering(cases: Sequence[Case]) -> set[int]:
    """Numbers of cases in which every (parameter, value) occurs; few, and the same ones each time."""
    missing = {value for case in cases for value in case}
    kept = set[int]() if missing else set(range(len(cases)))
    while missing:
        best = max(range(len(cases)), key=lambda number: (_gain(cases[number], missing), -number))
        kept.add(best)
        missing -= set(cases[best])
    return kept


def _gain(case: Iterable[tuple[str, str]], missing: set[tuple[str, str]]) -> int:
    return sum(value in missing for value in case)
