"""Output of a service or a library outside of the log becomes JSON if the cluster's log is JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quire.cluster.process import ServiceProcess
from tests.quire.cluster.test_leaving import Program

LINES = ["E1129 08:33:33.445 4212 hpack_encoder.cc:618] Ignoring key", '{"message": "ours"}', "{no JSON", "[1]"]


def logged(tmp_path: Path, log_format: str) -> list[str]:
    """Returns the log of a service that ends with a traceback."""
    program = f"import sys; [print(line, file=sys.stderr) for line in {LINES!r}]; raise RuntimeError('a fault')"
    command = (sys.executable, "-c", program)
    spec = Program("worker", "worker-0", {"log_format": log_format}, program=command)
    with (tmp_path / "log").open("w+") as log:
        process = ServiceProcess(spec, report=lambda _: None, log=log)
        process.start()
        assert process.wait(60)
        process.close()
        log.seek(0)
        return log.read().splitlines()


def test_each_is_an_object_of_the_json_log(tmp_path: Path) -> None:
    written = [json.loads(line) for line in logged(tmp_path, "json")]
    assert [entry["message"] for entry in written[: len(LINES)]] == [LINES[0], "ours", *LINES[2:]]
    assert written[0]["service"] == "worker-0"
    assert written[-1]["message"] == "RuntimeError: a fault"


def test_a_log_for_people_has_them_as_they_are(tmp_path: Path) -> None:
    written = logged(tmp_path, "text")
    assert written[: len(LINES)] == LINES
    assert written[-1] == "RuntimeError: a fault"
