"""A soak test of a few seconds."""

from __future__ import annotations

import json

import pytest

from tools.bench.__main__ import main


@pytest.mark.slow
def test_every_kind_of_call_is_made_workers_are_killed_and_no_block_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--minutes", "0.25", "--clients", "4", "--kill-every-s", "6", "--num-blocks", "600", "--threads", "1")
    assert main(["soak", *words, "--json"]) == 0
    rows = {row["service"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["all"]["errors"] == rows["all"]["unowned_blocks"] == 0
    assert rows["all"]["kills"] >= 1
    assert rows["all"]["unowned_most"] == 0
    kinds = {name.removeprefix("calls: ") for name in rows if name.startswith("calls: ")}
    assert kinds == {"stream", "samples", "constrained", "cancelled", "broken off", "refused"}
    assert {"frontend-0", "scheduler-0", "worker-0"} <= set(rows)
    assert rows["frontend-0"]["mem_mib"] > 10
