"""Every mode once, small, with real processes and the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.measuring import page_cache
from quire.bench.workload import shapes
from quire.cli.main import main
from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster

SMALL = ("--requests", "3", "--runs", "1", "--clients", "1", "--json")
RATES = {"out_tok_s", "total_tok_s", "req_s", "wall_s", "errors", "client_cpu", "runs"}
LATENCIES = {f"{what}_p{rank}_ms" for what in ("ttft", "itl", "tpot", "e2e") for rank in (50, 90, 99)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"num_blocks": 2000}) as running:
        yield running


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Runs `quire bench ... --json` and returns its rows."""
    assert main(["bench", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"machine", "versions", "command", "rows"} == document.keys()
    return list(document["rows"])


def test_throughput_starts_a_cluster_and_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--work", "cpu_batch,cpu_prefix", "--num-blocks", "2000", "--warmup", "0", "--steps")
    batch, prefix = bench(capsys, "throughput", *words, *SMALL)
    assert (batch["shape"], batch["work"], prefix["work"]) == ("tiny", "cpu_batch", "cpu_prefix")
    assert batch.keys() >= RATES
    assert batch["out_tok_s"] * batch["wall_s"] == pytest.approx(3 * 64, rel=0.01)
    assert prefix["prompt_tok_s"] * prefix["wall_s"] == pytest.approx(3 * 528, rel=0.01)
    assert {"us_hop", "us_scheduler_schedule", "us_worker_step_phase_forward"} <= batch.keys()
    assert {"cpu_us_tok_frontend", "cpu_us_tok_scheduler", "cpu_us_tok_worker"} <= batch.keys()


@pytest.mark.slow
def test_throughput_gives_requests_adapters_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--work", "cpu_batch", "--num-blocks", "2000", "--warmup", "0", "--lora-adapters", "2", "--lora-rank", "8")
    adapted, base, ratio = bench(capsys, "throughput", *words, *SMALL)
    assert [row["server"] for row in (adapted, base, ratio)] == [
        "quire",
        "without adapters",
        "quire / without adapters",
    ]
    assert adapted["errors"] == base["errors"] == 0
    assert ratio["out_tok_s"] == pytest.approx(adapted["out_tok_s"] / base["out_tok_s"], rel=0.001)


@pytest.mark.slow
def test_embed_measures_inputs_a_second_beside_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(shapes.CONFIGS, "bert-base", shapes.CONFIGS["bert-base"] | small)
    words = ("--inputs", "5", "--tokens", "16", "--ragged", "--per-call", "2", "--runs", "1", "--json")
    ours, theirs = bench(capsys, "embed", "bert-base", *words, "--beside-transformers", "cpu")
    assert [row["side"] for row in (ours, theirs)] == ["quire", "transformers"]
    assert ours["inputs_s"] * ours["mean_tokens"] == pytest.approx(ours["tokens_s"], rel=0.001)
    assert ours["ratio"] == pytest.approx(ours["inputs_s"] / theirs["inputs_s"], rel=0.001)


def test_serve_drives_a_cluster_that_is_there_both_ways(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--address", cluster.grpc_address, "--http", cluster.http_address)
    rows = bench(capsys, "serve", *there, "--work", "cpu_stream8", "--load", "2,100/s", "--warmup", "0", *SMALL)
    loads = [(row["protocol"], row["load"]) for row in rows]
    assert loads == [("grpc", "2"), ("http", "2"), ("grpc", "100/s"), ("http", "100/s")]
    for row in rows:
        assert row.keys() >= RATES | LATENCIES
        assert row["shape"] == "quire-tiny"
        assert row["errors"] == 0
        assert row["out_tok_s"] * row["wall_s"] == pytest.approx(3 * 64, rel=0.01)


def test_serve_drives_any_openai_server(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://{cluster.http_address}/v1"
    (row,) = bench(capsys, "serve", "--base-url", url, "--work", "cpu_batch", "--load", "burst", *SMALL)
    assert (row["protocol"], row["load"], row["errors"]) == ("http", "burst", 0)
    assert not any(name.startswith("cpu_us_tok") for name in row)


@pytest.mark.slow
def test_serve_takes_turns_with_another_server(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--address", cluster.grpc_address, "--http", cluster.http_address)
    words = ("--work", "cpu_batch", "--beside", f"twin=http://{cluster.http_address}")
    ours, theirs, ratio = bench(capsys, "serve", *there, *words, *SMALL)
    assert [row["server"] for row in (ours, theirs, ratio)] == ["quire", "twin", "quire / twin"]
    assert ratio["out_tok_s"] == pytest.approx(ours["out_tok_s"] / theirs["out_tok_s"], rel=1e-3)
    assert "cpu_us_tok_worker" in ours
    assert "cpu_us_tok_worker" not in theirs.keys() | ratio.keys()


def test_a_server_that_cannot_forget_prefixes_says_so(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://{cluster.http_address}/v1"
    assert main(["bench", "serve", "--base-url", url, "--work", "cpu_batch", "--reset-prefix-cache", *SMALL]) == 1
    assert "--no-reset-prefix-cache" in capsys.readouterr().err


def test_latency_is_of_one_stream(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--address", cluster.grpc_address, "--work", "cpu_single")
    (row,) = bench(capsys, "latency", *words, *SMALL)
    assert row["protocol"] == "grpc"
    assert 0 < row["itl_p50_ms"] <= row["itl_p99.9_ms"] <= row["itl_max_ms"]
    assert row["ttft_p50_ms"] < row["e2e_p50_ms"]


def test_requests_that_all_fail_are_no_result(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--address", cluster.grpc_address, "--work", "prefill")  # longer than the model's context
    assert main(["bench", "throughput", *words, *SMALL]) == 1
    assert "INVALID_ARGUMENT" in capsys.readouterr().err


def test_scheduler_rows_have_exactly_these_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "scheduler", "--running", "64,128", "--steps", "40", "--runs", "1", "--json")
    assert [(row["running"], row["mode"]) for row in rows] == [
        (64, "steady"), (128, "steady"), (64, "churn"), (128, "churn"),
    ]  # fmt: skip
    for row in rows:
        assert list(row) == [
            "running", "mode", "schedule_us", "apply_us", "encode_us", "decode_us", "total_us", "p99_us", "plan_bytes",
        ]  # fmt: skip
        assert row["total_us"] > 0
        assert row["p99_us"] > 0
    assert rows[0]["plan_bytes"] < 100
    assert rows[2]["plan_bytes"] > rows[0]["plan_bytes"]


@pytest.mark.slow
def test_startup_says_when_what_was_ready(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--runs", "1", "--cold", "0", "--num-blocks", "2000", "--json")
    whole, *events = bench(capsys, "startup", *words)
    assert 0 < whole["ready_s"] < whole["first_token_s"]
    assert {event["service"] for event in events} == {"scheduler-0", "worker-0", "frontend-0"}
    assert all(0 < event["at_s"] <= whole["first_token_s"] for event in events)


def test_a_start_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    assert main(["bench", "startup", str(tmp_path), "--runs", "1", "--cold", "0"]) == 1
    assert "before it was ready" in capfd.readouterr().err


def test_files_leave_the_page_cache_unharmed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * 10_000)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    page_cache.forget([tmp_path])
    assert (tmp_path / "weights").read_bytes() == b"w" * 10_000
