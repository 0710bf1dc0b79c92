"""A service that fails at start or later reports a reason, which reaches the user of the cluster."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, bundled
from quire.cluster.process import ServiceProcess
from quire.shared.errors import Unavailable
from tests.quire.cluster.test_leaving import Program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled.FOLDER, tmp_path / "model"))


def reason_of(folder: Path | str = "", **settings: Any) -> str:
    with pytest.raises(Unavailable) as refused:
        LLM(str(folder), **settings)
    return refused.value.message


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_tensor_that_is_missing_is_named_by_the_exception(folder: Path) -> None:
    """vllm#17618, #19002, #23176: "Engine core initialization failed. See root cause above"."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("model.norm.weight"))]
    save_file(tensors, file)
    assert "lacks tensors that the model needs: model.norm.weight" in reason_of(folder)


def test_a_shard_that_is_missing_is_named_by_the_exception(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    named = {"weight_map": dict.fromkeys(load_file(file), "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    reason = reason_of(folder)
    assert "worker-0 ended with status 2 before it was ready: " in reason
    assert "model-00002-of-00002.safetensors" in reason


def test_a_tokenizer_that_is_missing_is_named_by_the_exception(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in reason_of(folder)


def test_a_device_that_is_not_there_is_named_by_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reason = reason_of(device="cuda")
    assert "before it was ready: " in reason
    assert "device" in reason


def test_a_value_of_the_generation_config_is_named_by_the_exception(folder: Path) -> None:
    change(folder / "generation_config.json", temperature="hot")
    assert "temperature" in reason_of(folder)


def ended(program: str) -> ServiceProcess:
    spec = Program("worker", "worker-0", {}, program=(sys.executable, "-c", program))
    process = ServiceProcess(spec, lambda _: None, None)
    process.start()
    assert process.wait(60)
    return process


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('quire: model: no', file=sys.stderr); print('later', file=sys.stderr)", "model: no"),
        ("raise ValueError('of a library')", "ValueError: of a library"),
        ("import os; os.write(2, b'a' * 9_000_000)", "a" * 1_000),
        ("import os; os.write(2, b'\\xff'); os.abort()", "\ufffd"),
        ("pass", ""),
    ],
)
def test_the_last_lines_of_any_process_are_its_reason(program: str, reason: str, capfd: Any) -> None:
    process = ended(program)
    assert process.reason.endswith(reason)
    assert len(process.reason) < 4_000
    process.close()


LOGGED = [  # ordinary lines of both formats
    '{"time": 1.5, "level": "info", "service": "worker-0", "message": "attached"}',
    '{"time": 1.5, "level": "warning", "service": "worker-0", "message": "slow"}',
    "00:03:17.304 I worker-0 attached scheduler=scheduler-0 epoch=1795996997298",
]
FAULT = {"level": "critical", "message": "uncaught", "exception": "Traceback:\n  ...\nRuntimeError: a fault"}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (LOGGED, ""),  # killed from outside, by its last words nothing has happened
        (["quire: model: no", *LOGGED[:2]], "model: no"),
        ([*LOGGED, json.dumps(FAULT)], "uncaught: RuntimeError: a fault"),
        ([json.dumps({**FAULT, "exception": f"Traceback:\n{'  x' * 9_000}\nMemoryError"})], "uncaught: MemoryError"),
        ([LOGGED[2], "00:03:18.000 E worker-0 no memory"], "00:03:18.000 E worker-0 no memory"),
        (["terminate called after throwing", LOGGED[2], "Aborted"], "terminate called after throwing | Aborted"),
    ],
)
def test_ordinary_log_lines_are_no_reason(lines: list[str], reason: str, capfd: Any) -> None:
    process = ended(f"import os, sys; sys.stderr.write({chr(10).join(lines)!r}); sys.stderr.flush(); os.abort()")
    assert process.reason == reason
    process.close()


def test_what_a_process_writes_goes_to_the_log_as_well(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        spec = Program("worker", "worker-0", {}, program=(sys.executable, "-c", "raise ValueError('of a library')"))
        process = ServiceProcess(spec, lambda _: None, log)
        process.start()
        assert process.wait(60)
        process.close()
    written = (tmp_path / "log").read_text()
    assert written.startswith("Traceback")
    assert written.endswith("ValueError: of a library\n")
