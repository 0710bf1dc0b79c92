"""Reduces parameter sweeps: of a product of parameters, keeps enough cases that each value of each parameter occurs.

The others are marked `sweep`, which only `make test-all` runs, or `slow`, which CI runs, too. Tests with one
parameter keep all cases, and so do tests outside of the tables, except where the cases of a test together take more
processor time than BUDGET_S.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# `sweep`: where products are large and each case is slow: kernels in Triton's interpreter, models against transformers,
# and every method of drafting with every parameter. `slow`: what each change has to pass in full.
SWEEPS = {
    "sweep": (
        "tests/kernels/triton/",
        "tests/kernels/cpu/test_build.py",
        "tests/kernels/reference/test_attention.py",
        "tests/batch_invariance/",
        "tests/services/worker/building/checks/test_batch_invariance.py",
        "tests/services/worker/models/test_logits.py",
        "tests/services/worker/sampling/test_sampler_distribution.py",
        "tests/services/worker/models/test_recorded_kernels.py",
        "tests/spec_decode/test_same_text.py",
    ),
    "slow": ("tests/services/scheduler/core/test_random_operations.py",),
}

# How many cases of a test stay; the others are `slow`.
FIRST_CASES = {
    "tests/batch_invariance/test_interpreted.py::test_logits_are_bit_identical_in_steps_of_all_kinds": 1,
    "tests/chaos/test_keys.py::test_corrupt_or_missing_key_files_keep_the_old_ones_in_force": 1,
    "tests/chaos/test_network.py::test_a_cut_connection_costs_a_pause": 1,
    "tests/chaos/test_schedulers.py::test_the_scheduler_is_killed": 1,
    "tests/e2e/kv/test_prefix_parts.py::test_concurrent_requests_in_few_blocks_are_unchanged": 1,
    "tests/services/frontend/bounds/test_garbage.py::test_a_refused_prompt_leaves_no_tokens_in_memory": 1,
    "tests/services/worker/ranks/test_dispatch.py::test_experts_that_move_at_every_step": 1,
    "tests/services/worker/ranks/test_dispatch.py::test_more_ranks_some_of_them_without_rows": 2,
    "tests/services/worker/ranks/test_dispatch.py::test_dispatching_ranks_match_one": 4,
    "tests/services/worker/ranks/test_dispatch.py::test_steps_of_both_ways_take_turns": 2,
    "tests/services/worker/ranks/test_expert_parallel.py::test_moving_experts_do_not_change_output": 2,
    "tests/services/worker/ranks/test_expert_parallel.py::test_expert_parallel_ranks_match_one": 3,
    "tests/services/worker/ranks/test_sharding.py::test_two_ranks_match_one": 8,
    "tests/spec_decode/test_prefix_parts.py::test_preempted_sequences_generate_the_same": 2,
    "tests/spec_decode/test_prefix_parts.py::test_the_same_texts_with_little_recomputation": 2,
}

# Of the slow ones, too, only so many stay where each case takes half a minute; the others are `sweep`.
FIRST_SLOW_CASES = {
    "tests/batch_invariance/test_interpreted.py::test_logits_are_bit_identical_in_steps_of_all_kinds": 2,
    "tests/chaos/test_attach.py::test_streams_of_a_killed_frontend_resume_at_another": 1,
    "tests/chaos/test_handover.py::test_streams_survive": 2,
    "tests/chaos/test_keys.py::test_a_certificate_that_has_expired_is_a_pause_until_there_is_another": 1,
    "tests/chaos/test_late_interaction.py::test_scores_are_unchanged_when_services_are_killed": 2,
    "tests/chaos/test_ranks.py::test_a_rank_that_has_a_part_of_the_prompts_is_killed_or_hangs": 2,
    "tests/chaos/test_ranks.py::test_a_stage_of_one_of_two_workers_is_killed_or_hangs": 1,
    "tests/chaos/test_schedulers.py::test_redis_is_away_while_another_part_goes": 2,
    "tests/chaos/test_tiers.py::test_killed_in_the_middle_of_a_move": 3,
    "tests/kernels/cpu/test_build.py::test_every_width_compiles": 2,
    "tests/services/worker/models/test_recorded_kernels.py::test_no_kernel_of_a_graph_is_forgotten": 3,
}
# Where products are so large that `slow` is every sixth of what is left.
EVERY_SIXTH = ("tests/services/scheduler/core/test_random_operations.py",)

# Seconds of processor time that all cases of a test may take in `make test`. The others are `slow`; one always stays.
BUDGET_S = 0.3
# Seconds of one case of the tests that exceed it, as `make test-costs` reports them.
COST_OF_A_CASE_S: Mapping[str, float] = json.loads(Path(__file__).with_name("cost_of_a_case.json").read_text())
SELECTED_ELSEWHERE = ("gpu", "slow", "sweep")

# How the expressions of runs begin that select nothing but slow tests.
SLOW_ONLY = "slow and "

ROOT = Path(__file__).parents[1]
Case = tuple[tuple[str, str], ...]  # (parameter, value) of a test


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Marks the cases that add no new parameter value."""
    for mark, places in SWEEPS.items():
        by_test: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.nodeid.startswith(places):
                by_test[item.nodeid.partition("[")[0]].append(item)
        for same in by_test.values():
            kept = covering([case_of(item) for item in same])
            for number, item in enumerate(same):
                if number not in kept:
                    item.add_marker("sweep" if number % 6 and item.nodeid.startswith(EVERY_SIXTH) else mark)
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] > FIRST_CASES.get(test, len(items)):
            item.add_marker("slow")
        if seen[test] > FIRST_SLOW_CASES.get(test, len(items)):
            item.add_marker("sweep")
    mark_above_budget(items, COST_OF_A_CASE_S)


def mark_above_budget(items: Sequence[pytest.Item], costs: Mapping[str, float]) -> None:
    """Marks as `slow` the cases of a test for which its budget does not suffice."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in costs and not any(map(item.get_closest_marker, SELECTED_ELSEWHERE)):
            by_test[test].append(item)
    for test, same in by_test.items():
        kept = spread(test, len(same), max(1, int(BUDGET_S / costs[test])))
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker("slow")


def spread(test: str, count: int, kept: int) -> set[int]:
    """Returns the indices of `kept` of `count` cases, at even distances and from one that depends on the test's name:
    tests with the same parameters, such as families of models, keep different ones."""
    first, kept = zlib.crc32(test.encode()), min(kept, count)
    return {(first + number * count // kept) % count for number in range(kept)}


def may_have_slow_tests(file: Path) -> bool:
    """Whether a test file names the mark `slow`, or the tables above give it to some of its cases. Runs of slow tests
    import no other file."""
    name = str(file.relative_to(ROOT))
    tables = (*SWEEPS["slow"], *(test.partition("::")[0] for test in (*FIRST_CASES, *COST_OF_A_CASE_S)))
    return name in tables or "mark.slow" in file.read_text()


def check_slow_files(items: Iterable[pytest.Item]) -> None:
    """Raises if a slow test is in a file that runs of slow tests do not import."""
    for file in {item.path for item in items if item.get_closest_marker("slow")}:
        if not may_have_slow_tests(file):
            raise pytest.UsageError(f"{file.relative_to(ROOT)} has slow tests but does not name mark.slow")


def case_of(item: Any) -> Case:
    """Returns a test's parameters by their ids, so that values need not be hashable."""
    spec = getattr(item, "callspec", None)
    return tuple(sorted((name, repr(value)) for name, value in spec.params.items())) if spec else ()


def covering(cases: Sequence[Case]) -> set[int]:
    """Returns indices of a small, deterministic set of cases in which every (parameter, value) occurs."""
    missing = {value for case in cases for value in case}
    kept = set[int]() if missing else set(range(len(cases)))
    while missing:
        best = max(range(len(cases)), key=lambda number: (_gain(cases[number], missing), -number))
        kept.add(best)
        missing -= set(cases[best])
    return kept


def _gain(case: Iterable[tuple[str, str]], missing: set[tuple[str, str]]) -> int:
    return sum(value in missing for value in case)
