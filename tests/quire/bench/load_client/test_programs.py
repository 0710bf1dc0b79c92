from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire.bench.load_client.arrivals import parse
from quire.bench.load_client.programs import Program
from quire.bench.workload import workloads
from quire.shared.errors import Unavailable

ENGINE = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    load = json.loads(line)
    assert len(load["prompts"]) == len(load["num_output"])
    seconds = 0.5 if load["forget"] else 0.25
    print(json.dumps({"seconds": seconds, "num_output": load["num_output"]}), flush=True)
"""


def program(folder: Path, text: str) -> str:
    path = folder / "engine.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def test_a_program_says_how_long_a_load_took(tmp_path: Path) -> None:
    work = workloads.cpu_batch()
    with Program(program(tmp_path, ENGINE)) as engine:
        engine.forget()
        first, second = (engine.run(work, parse("burst")) for _ in range(2))
    assert first.wall_s == pytest.approx(0.5)
    assert second.wall_s == pytest.approx(0.25)
    assert first.num_tokens == work.num_output_tokens
    assert second.rates()["out_tok_s"] == pytest.approx(4 * work.num_output_tokens)


def test_a_program_that_ends_is_named(tmp_path: Path) -> None:
    command = program(tmp_path, "raise SystemExit(3)")
    with pytest.raises(Unavailable, match="status 3"):
        Program(command)
