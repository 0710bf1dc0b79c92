"""The benchmark of draft trees runs and compares trees with chains."""

from __future__ import annotations

from tests.spec_decode.bench_trees import OFF, cases, compare
from tests.spec_decode.pair import build
from tools.bench import tiny_work


def test_chains_and_trees_are_measured_on_the_same_questions() -> None:
    chosen = {
        name: config for name, config in cases().items() if name in (OFF, "medusa chain of 4", "medusa tree of 8")
    }
    items = tiny_work.work("tiny_echo").items[:3]
    found = compare({name: build(config) for name, config in chosen.items()}, items, at_once=2, rounds=1)
    assert found[OFF].tokens_per_step == 1
    assert 1 < found["medusa chain of 4"].tokens_per_step <= found["medusa tree of 8"].tokens_per_step <= 5
    assert all(each.us > 0 and each.tokens_per_s > 0 for each in found.values())
