"""Kernels are compiled for a GPU that is not there."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import triton

from quire.kernels.triton.precompile import packed_jobs, precompile
from quire.kernels.triton.precompile.jobs import jobs
from quire.kernels.triton.precompile.precompile import LatentShape, ModelShape, PackedShape, missing
from quire.kernels.triton.precompile.processes import AbsentGpu
from quire.kernels.triton.quantization.packed_weight import pack
from quire.kernels.triton.quantization.warp_groups import ROWS
from tests.kernels.triton.quantization.weights import integers

TINY = ModelShape(256, 768, 8, 4, 32, 1000, True, 16, 8, "float16", "float16", single_row=True)
PROGRAM = """
import os, sys
from pathlib import Path
from quire.kernels.triton.precompile import processes
from quire.kernels.triton.precompile.precompile import LatentShape, Missing, ModelShape, PackedShape
every, folder = processes.jobs, Path({folder!r})
def done():
    (folder / "done").open("a").write("x")
processes.jobs = lambda shape: {jobs}
sys.exit(not processes.compile_all(Missing({shape!r}, 90, 2, folder / "marker")))
"""


def compile_some(folder: Path, some: str, shape: ModelShape = TINY) -> int:
    """`some`: an expression for the jobs; the exit status."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM.format(folder=str(folder), jobs=some, shape=shape)]
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.skipif(not triton.knobs.nvidia.ptxas.path, reason="Triton came without an assembler")
def test_machine_code_without_a_gpu(tmp_path: Path) -> None:
    assert (
        compile_some(tmp_path, "[job for job in every(shape) if job.__name__ in ('norms', 'gate', 'store', 'edges')]")
        == 0
    )
    names = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert {"_rms_norm", "_silu_mul", "_begin_step", "_end_step", "_qk_norm_rope_store"} <= names


def test_a_job_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    assert compile_some(tmp_path, "[done, lambda: 1 / 0, *[done] * 20]") == 1
    assert (tmp_path / "done").read_text() == "x" * 21


def test_every_job_is_done_once(tmp_path: Path) -> None:
    assert compile_some(tmp_path, "[done] * 7") == 0
    assert (tmp_path / "done").read_text() == "x" * 7


def test_single_rows_are_jobs_of_their_own() -> None:
    count = len(list(jobs(TINY)))
    plain = len(list(jobs(dataclasses.replace(TINY, single_row=False))))
    assert plain == count - 6


@pytest.mark.slow
def test_products_with_codes_of_4_bits_have_jobs_that_compile(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(64, None))
    first = compile_some(tmp_path, "list(every(shape))[:5]", shape)
    assert first == 0
    wanted = {"_packed_row_linear", "_packed_many_rows", "_packed_linear"}
    assert wanted <= {path.stem for path in tmp_path.rglob("*.cubin")}


@pytest.mark.slow
def test_a_hopper_has_jobs_for_groups_of_warps_that_compile(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(128, 8.0))
    assert compile_some(tmp_path, "list(every(shape))[:1]", shape) == 0
    assert {path.stem for path in tmp_path.rglob("*.cubin")} >= {"_packed_warp_groups"}


@pytest.mark.parametrize(("capability", "rows"), [(90, ROWS), (80, ()), (100, ())])
def test_jobs_for_groups_of_warps_are_those_of_the_gpu(
    capability: int, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = pack(integers(1024, 2048, 128, 4, zeros=False))
    monkeypatch.setattr(packed_jobs, "driver", Mock(active=AbsentGpu(capability)))
    assert packed_jobs.tile_rows_for_the_gpu(weight) == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [("latent", {"latent": LatentShape(64, 16, 32)}), ("adapter", {"num_adapters": 4}), ("packed", {})],
)
def test_what_the_interpreter_takes_compiles_as_well(tmp_path: Path, kind: str, more: dict[str, object]) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(64, 8.0), **more)
    of_kind = f"[job for job in every(shape) if job.__module__ == 'quire.kernels.triton.precompile.{kind}_jobs']"
    assert compile_some(tmp_path, of_kind, shape) == 0
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_in_chunks_compiles_as_well(tmp_path: Path, *, invariant: bool) -> None:
    shape = dataclasses.replace(TINY, chunked_windows=True, batch_invariant=invariant)
    assert compile_some(tmp_path, "[job for job in every(shape) if '.in_chunks.' in job.__qualname__]", shape) == 0
    wanted = {"_attention"} if invariant else {"_chunk_attention", "_decode_attention"}
    assert wanted <= {path.stem for path in tmp_path.rglob("*.cubin")}


def test_nothing_is_missing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: None)
    assert missing(TINY, 16) is None


def test_a_disk_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)
    (tmp_path / "file").touch()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    assert missing(TINY, 8) is None


def test_what_is_on_disk_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    lacking = missing(TINY, 8)
    assert lacking is not None
    assert (lacking.shape, lacking.capability, lacking.num_processes) == (TINY, 90, 6)
    assert missing(TINY, 8) == lacking
    lacking.leave_marker()
    assert missing(TINY, 8) is None
    assert missing(dataclasses.replace(TINY, block_size=32), 8) is not None


def test_one_core_compiles_nothing_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    assert missing(TINY, 2) is None
    assert missing(TINY, 3) is not None
