"""Documents, tables and comparisons."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from quire.bench import report
from quire.shared.errors import InvalidArgument

ROWS: list[report.Row] = [
    {"shape": "tiny", "work": "mixed", "out_tok_s": 1234.56789, "runs": 3},
    {"shape": "tiny", "work": "decode", "out_tok_s": 3.0, "runs": 3},
]


def test_a_document_says_what_where_and_how() -> None:
    document = report.document_of(ROWS, ["quire", "bench"])
    assert list(document) == ["machine", "versions", "command", "rows"]
    assert {"cpu", "cores", "memory_gib"} <= document["machine"].keys()
    assert {"quire", "python", "grpcio"} <= document["versions"].keys()
    assert document["rows"][0] == {"shape": "tiny", "work": "mixed", "out_tok_s": 1234.6, "runs": 3}
    json.dumps(document)


def test_the_command_measures_again_and_stores_nothing() -> None:
    words = ["quire", "bench", "serve", "a b", "--out", "x.json", "--json", "--compare=y.json", "--runs", "3"]
    assert report.command(words) == "quire bench serve 'a b' --runs 3"


def test_comparison_is_row_by_row_with_what_both_have() -> None:
    stored: list[report.Row] = [
        {"work": "decode", "shape": "tiny", "out_tok_s": 2.0, "peer_only": 1},
        {"work": "single", "shape": "tiny", "out_tok_s": 2.0},
    ]
    lines = report.comparison(ROWS, stored).splitlines()
    assert [line.split() for line in lines] == [["shape", "work", "out_tok_s"], ["tiny", "decode", "1.50x"]]
    assert report.comparison(ROWS[:1], stored) == "the stored result and this one have no row in common"


def test_rows_of_a_scheduler_are_told_apart_by_their_size() -> None:
    rows: list[report.Row] = [{"running": n, "mode": "steady", "total_us": float(n)} for n in (64, 256)]
    stored: list[report.Row] = [{"running": 256, "mode": "steady", "total_us": 512.0}]
    assert report.comparison(rows, stored).splitlines()[1].split() == ["256", "steady", "0.50x"]


def test_a_table_turns_when_its_lines_would_be_too_long() -> None:
    assert report.table(ROWS).splitlines()[1].split() == ["tiny", "mixed", "1,235", "3"]
    wide: list[report.Row] = [{f"measure_number_{i}": float(i) for i in range(20)}]
    assert report.table(wide).splitlines()[3].split() == ["measure_number_3", "3"]


def test_results_are_stored_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "result.json")
    report.publish(Namespace(out=path, compare="", json=False), ROWS, [])
    capsys.readouterr()
    report.publish(Namespace(out="", compare=path, json=True), ROWS, [])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == report.stored_rows(path)
    assert "1.00x" in printed.err


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(InvalidArgument, match=r"other\.json"):
        report.stored_rows(str(path))
