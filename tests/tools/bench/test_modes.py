"""Every developer benchmark once, small, with real processes and the bundled model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tests.quire.bench.modes.test_modes import LATENCIES, RATES, SMALL
from tools.bench import kernel_programs
from tools.bench.__main__ import main


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"num_blocks": 2000}) as running:
        yield running


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Runs `python -m tools.bench ... --json` and returns its rows."""
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"].startswith(f"python -m tools.bench {words[0]} ")
    return list(document["rows"])


def test_the_modes_of_users_are_there_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "scheduler", "--running", "64", "--steps", "40", "--runs", "1", "--modes", "steady", "--json")
    assert [row["running"] for row in rows] == [64]


def test_an_unknown_mode_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sheduler"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_speculation_measures_methods_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--methods", "medusa", "--work", "tiny_counting", "--load", "burst", "--num-blocks", "2000", "--fixed")
    off, medusa = bench(capsys, "speculation", *words, "--max-num-seqs", "2", "--warmup", "0", *SMALL)
    assert [row["method"] for row in (off, medusa)] == ["off", "medusa"]
    assert off["speedup"] == 1
    assert medusa["speedup"] > 0
    assert off["full_tok_s"] > 0
    assert medusa["full_speedup"] == pytest.approx(medusa["full_tok_s"] / off["full_tok_s"], rel=0.001)
    assert "accepted" not in off
    assert 0.4 < medusa["accepted"] < 1
    assert 2 < medusa["tok_per_draft"] <= 5
    assert medusa["length"] == 4
    assert off["errors"] == medusa["errors"] == 0


@pytest.mark.slow
def test_a_control_is_a_second_cluster_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--methods", "control", "--work", "tiny_counting", "--load", "burst", "--num-blocks", "2000", "--whole")
    off, control = bench(capsys, "speculation", *words, "--warmup", "0", *SMALL)
    assert [row["method"] for row in (off, control)] == ["off", "control"]
    assert control["speedup"] > 0
    assert "accepted" not in control


def test_structured_measures_the_same_requests_with_schemas_and_without(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--address", cluster.grpc_address, "--tokens", "40", "--warmup", "0")
    free, bound = bench(capsys, "structured", *words, *SMALL)
    assert [row["constraint"] for row in (free, bound)] == ["free", "own schema"]
    assert free["of_free"] == 1
    assert bound["of_free"] > 0
    assert free["errors"] == bound["errors"] == 0


@pytest.mark.slow
def test_restart_says_what_a_killed_worker_still_had(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--count", "3", "--num-blocks", "2000", "--kv-offloading-size", "0.05")
    rows = bench(capsys, "restart", *words, "--settle-s", "3", "--json")  # writers have the least priority
    shares = {row["kept"]: row["cached_share"] for row in rows}
    assert list(shares) == ["nothing", "region", "disk"]
    assert shares["nothing"] == 0
    assert min(shares["region"], shares["disk"]) > 0.9


PROGRAM = """
import json, sys
if __name__ == "__main__":
    row = {"section": sys.argv[1], "case": "c", "microseconds": {"ours": 2.0, "theirs": 3.0},
           "rate": 4.0, "unit": "GB/s", "ratio": 1.5}
    open(sys.argv[-1], "w").write(json.dumps([row]))
"""


def test_kernel_benches_are_found_run_and_collected(tmp_path: Path) -> None:
    assert "cpu" in kernel_programs.programs()
    folder = tmp_path / "kernels" / "bench"
    for name, text in (("good", PROGRAM), ("bad", PROGRAM.replace('"rate"', "1 / 0, "))):
        (folder / name).mkdir(parents=True)
        (folder / name / "__main__.py").write_text(text)
    (folder / "timing.py").write_text("")
    asked = argparse.Namespace(programs="", sections=["linear"])
    (row,) = kernel_programs.measure(asked, folder)
    assert row == {
        "program": "good", "section": "linear", "case": "c",
        "us_ours": 2.0, "us_theirs": 3.0, "rate_GB/s": 4.0, "ratio": 1.5,
    }  # fmt: skip


@pytest.mark.slow
def test_roles_are_measured_against_workers_that_do_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-blocks", "2000", "--threads", "1", "--warmup", "0", "--load", "2", "--prefill-threshold", "64")
    mixed, apart, shares = bench(capsys, "roles", *words, *SMALL)
    assert [row["layout"] for row in (mixed, apart, shares)] == ["mixed", "apart", "apart / mixed"]
    assert mixed.keys() >= RATES | LATENCIES
    assert apart["handovers"] > 0
    assert apart["failed"] == 0
    assert shares["ttft_p50_ms"] == pytest.approx(apart["ttft_p50_ms"] / mixed["ttft_p50_ms"], rel=0.01)
