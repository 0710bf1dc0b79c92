"""The benchmark of steps without drafts runs and measures every kind of step."""

from __future__ import annotations

import pytest

from tests.spec_decode import bench_idle


@pytest.mark.parametrize("method", ["off", "draft_model"])
def test_steps_of_every_kind_are_timed(method: str) -> None:
    rows = {row["kind"]: row for row in bench_idle.measure(method, "cpu", num_seqs=8, rounds=1)}
    assert {"plain", "blocks", "prompts", "all"} <= set(rows)
    assert method != "off" or "drafts" not in rows
    for kind in ("plain", "blocks", "prompts"):
        parts = {name: value for name, value in rows[kind].items() if name.endswith("_us")}
        assert all(value > 0 for value in parts.values())
        assert parts["worker_us"] >= parts["launch_us"]
        assert parts["scheduler_us"] >= parts["schedule_us"]
