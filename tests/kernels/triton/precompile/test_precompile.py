"""Kernels are compiled for an absent GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from quire.kernels.capability import SM80, SM90, SM100, Capability
from quire.kernels.triton.precompile.calls import precompile_calls
from quire.kernels.triton.precompile.precompile import missing
from quire.kernels.triton.precompile.shapes import LatentShape, ModelShape, PackedShape
from quire.kernels.triton.quantization import warp_groups

TINY = ModelShape(256, 768, 8, 4, 32, 1000, True, 16, 8, "float16", "float16", single_row=True)
PROGRAM = """
import os, sys
from pathlib import Path
from quire.kernels.triton.precompile import processes
from quire.kernels.triton.precompile.precompile import Missing
from quire.kernels.triton.precompile.shapes import LatentShape, ModelShape, PackedShape
every, folder = processes.precompile_calls, Path({folder!r})
def module_of(call):
    return getattr(call, "func", call).__module__.removeprefix("quire.kernels.triton.")
def done():
    (folder / "done").open("a").write("x")
processes.precompile_calls = lambda shape: {calls}
sys.exit(not processes.compile_all(Missing({shape!r}, 90, 2, folder / "marker")))
"""


def compile_some(folder: Path, some: str, shape: ModelShape = TINY) -> int:
    """Compiles the calls of an expression in a child process; returns the exit status."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM.format(folder=str(folder), calls=some, shape=shape)]
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.skipif(not triton.knobs.nvidia.ptxas.path, reason="Triton came without an assembler")
def test_machine_code_without_a_gpu(tmp_path: Path) -> None:
    assert (
        compile_some(
            tmp_path,
            "[call for call in every(shape) if module_of(call) in"
            " ('rms_norm', 'activation', 'attention.attention_inputs', 'step_edges')]",
        )
        == 0
    )
    names = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert {"_rms_norm", "_silu_mul", "_begin_step", "_end_step", "_qk_norm_rope_store"} <= names


def test_failed_call_does_not_affect_others(tmp_path: Path) -> None:
    assert compile_some(tmp_path, "[done, lambda: 1 / 0, *[done] * 20]") == 1
    assert (tmp_path / "done").read_text() == "x" * 21


@pytest.mark.slow
def test_every_call_is_made_once(tmp_path: Path) -> None:
    assert compile_some(tmp_path, "[done] * 7") == 0
    assert (tmp_path / "done").read_text() == "x" * 7


def test_single_rows_have_calls_of_their_own() -> None:
    count = len(list(precompile_calls(TINY)))
    plain = len(list(precompile_calls(dataclasses.replace(TINY, single_row=False))))
    assert plain == count - 6


@pytest.mark.slow
def test_products_with_codes_of_4_bits_have_calls_that_compile(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(64, None))
    some = "[call for call in every(shape) if 'packed' in module_of(call)][:8]"
    assert compile_some(tmp_path, some, shape) == 0
    wanted = {"_packed_row_linear", "_packed_many_rows", "_packed_linear"}
    assert wanted <= {path.stem for path in tmp_path.rglob("*.cubin")}


@pytest.mark.slow
def test_a_hopper_has_calls_for_groups_of_warps_that_compile(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(128, 8.0))
    assert compile_some(tmp_path, "list(every(shape))[:1]", shape) == 0
    assert {path.stem for path in tmp_path.rglob("*.cubin")} >= {"_packed_warp_groups"}


@pytest.mark.parametrize(("capability", "has_kernel"), [(SM80, False), (SM90, True), (SM100, False), ((12, 0), False)])
def test_calls_for_groups_of_warps_are_those_of_the_gpu(
    capability: Capability, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warp_groups.HAS_KERNEL, "here", warp_groups.HAS_KERNEL.of(capability))
    shape = dataclasses.replace(TINY, packed=PackedShape(128, 8.0))
    assert len(list(warp_groups.precompile_calls(shape))) == (4 * len(warp_groups.ROWS) if has_kernel else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "more"),
    [("latent", {"latent": LatentShape(64, 16, 32)}), ("low_rank", {"num_adapters": 4}), ("packed", {})],
)
def test_interpreted_kernels_also_compile(tmp_path: Path, modules: str, more: dict[str, object]) -> None:
    shape = dataclasses.replace(TINY, packed=PackedShape(64, 8.0), **more)
    some = f"[call for call in every(shape) if {modules!r} in module_of(call)]"
    assert compile_some(tmp_path, some, shape) == 0
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_in_chunks_compiles_as_well(tmp_path: Path, *, invariant: bool) -> None:
    shape = dataclasses.replace(TINY, chunked_windows=True, batch_invariant=invariant)
    modules = (
        ("batch_invariant.attention",) if invariant else ("attention.chunk_attention", "attention.decode_attention")
    )
    some = f"[call for call in every(shape) if module_of(call) in {modules!r}]"
    assert compile_some(tmp_path, some, shape) == 0
    wanted = {"_attention"} if invariant else {"_chunk_attention", "_decode_attention"}
    assert wanted <= {path.stem for path in tmp_path.rglob("*.cubin")}


def test_nothing_is_missing_without_a_gpu() -> None:
    assert missing(TINY, 16, None) is None


def test_unwritable_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert missing(TINY, 8, 90) is None


def test_cached_kernels_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lacking = missing(TINY, 8, 90)
    assert lacking is not None
    assert (lacking.shape, lacking.capability, lacking.num_processes) == (TINY, 90, 6)
    assert missing(TINY, 8, 90) == lacking
    lacking.leave_marker()
    assert missing(TINY, 8, 90) is None
    assert missing(dataclasses.replace(TINY, block_size=32), 8, 90) is not None


def test_single_core_skips_precompilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert missing(TINY, 2, 90) is None
    assert missing(TINY, 3, 90) is not None
