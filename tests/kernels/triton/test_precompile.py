"""Kernels are compiled for a GPU that is not there."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from kernels.triton import precompile
from kernels.triton.precompile import ModelShape

TINY = ModelShape(256, 768, 8, 4, 32, 1000, True, 16, 8, "float16", "float16", single_row=True)


def compiled(folder: Path, index: int, count: int) -> set[str]:
    """Names of the kernels that a process has made machine code of."""
    words = json.dumps({"shape": dataclasses.asdict(TINY), "capability": 90, "count": count})
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "kernels.triton.precompile", words, str(index)]
    subprocess.run(command, env=environment, check=True, timeout=100)
    return {path.stem for path in folder.rglob("*.cubin")}


@pytest.mark.skipif(not triton.knobs.nvidia.ptxas.path, reason="Triton came without an assembler")
def test_machine_code_without_a_gpu(tmp_path: Path) -> None:
    count = len(list(precompile.jobs(TINY)))
    names = set()
    for index, job in enumerate(precompile.jobs(TINY)):
        if job.__name__ in ("rows", "masks"):
            names |= compiled(tmp_path, index, count)
    assert {"_rms_norm", "_silu_mul", "_begin_step", "_end_step", "_qk_norm_rope_store", "_mask_logits"} <= names


def test_every_job_is_somebodys() -> None:
    count = len(list(precompile.jobs(TINY)))
    shares = [list(range(count))[index::3] for index in range(3)]
    assert sorted(job for share in shares for job in share) == list(range(count))
    plain = len(list(precompile.jobs(dataclasses.replace(TINY, single_row=False))))
    assert plain == count - 6


def test_nothing_is_started_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: None)
    assert not precompile.start(TINY, 16).wait()


def test_a_disk_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)
    (tmp_path / "file").touch()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    assert not precompile.start(TINY, 8).wait()


def test_what_is_on_disk_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    started = []

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command[-1])

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert precompile.start(TINY, 8).wait()
    assert started == ["0", "1", "2", "3", "4", "5"]
    assert not precompile.start(TINY, 8).wait()
    other = dataclasses.replace(TINY, block_size=32)
    assert precompile.start(other, 8).wait()
