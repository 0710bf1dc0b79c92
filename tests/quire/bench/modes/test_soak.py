"""A soak of seconds; and that what grows is seen to grow."""

from __future__ import annotations

import json

import pytest

from quire.bench.modes.soak import Look, growth, unowned_meanwhile
from quire.cli.main import main


def test_growth_is_a_slope_through_all_looks() -> None:
    leaking = [Look(float(second), (100 + second) * 2**20, 50 + second, 7) for second in range(10)]
    row = growth(leaking)
    assert row["rss_mib"] == 100
    assert row["rss_end_mib"] == 109
    assert row["rss_mib_h"] == pytest.approx(3600)
    assert row["fds_h"] == pytest.approx(3600)
    assert row["threads_h"] == 0


def test_blocks_that_nobody_owns_show_while_the_load_goes_on() -> None:
    row = unowned_meanwhile([(float(second), 2 * second) for second in range(10)])
    assert row["unowned_most"] == 18
    assert row["unowned_h"] == pytest.approx(7200)
    assert unowned_meanwhile([(0.0, 3)]) == {}, "too few looks for a slope"


@pytest.mark.slow
def test_every_kind_of_call_is_made_workers_are_killed_and_no_block_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--minutes", "0.25", "--clients", "4", "--kill-every-s", "6", "--num-blocks", "600", "--threads", "1")
    assert main(["bench", "soak", *words, "--json"]) == 0
    rows = {row["service"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["all"]["errors"] == rows["all"]["unowned_blocks"] == 0
    assert rows["all"]["kills"] >= 1
    assert {"unowned_most", "unowned_h"} <= set(rows["all"])
    kinds = {name.removeprefix("calls: ") for name in rows if name.startswith("calls: ")}
    assert kinds == {"stream", "samples", "constrained", "cancelled", "broken off", "refused"}
    assert {"frontend-0", "scheduler-0", "worker-0"} <= set(rows)
    assert rows["frontend-0"]["rss_mib"] > 10
