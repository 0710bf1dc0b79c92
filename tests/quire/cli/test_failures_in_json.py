"""The launcher's own lines in a JSON log."""

from __future__ import annotations

import json

import pytest

from quire.cli.up import report_failure


def test_the_end_of_a_process_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure("worker-0 ended with status -9; restarting in 0.5 s")
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["service"]) == ("error", "quire")
    assert entry["message"] == "worker-0 ended with status -9; restarting in 0.5 s"
