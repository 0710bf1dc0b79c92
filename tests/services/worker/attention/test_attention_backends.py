"""Selection of attention backends by phase, and their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.attention import backends
from quire.services.worker.attention.per_phase import PerPhaseAttention
from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata, AttentionSpec
from quire.shared.errors import InvalidArgument
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.paged import Case, Rows

SPEC = AttentionSpec("cuda", "bfloat16", "bfloat16", 128, 16, 8, 64, has_window=False, capability=(9, 0))
AMPERE = (8, 0)
PAGED = replace(SPEC, block_size=256, capability=AMPERE)  # supported by flash-attn 2


class Fake:
    """Backend that accepts or refuses, and returns its name."""

    def __init__(self, name: str, reason: str | None) -> None:
        self.name, self._reason = name, reason
        self.records_decodes = self.records_chunks = self.masks_trees = self.sees_ahead = name == "triton"

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return self._reason

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 32 if self.name == "triton" else 0

    def attend(self, *_: object, **__: object) -> str:
        return self.name


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch):
    def use(*names: str) -> None:
        monkeypatch.setattr(backends, "load_backend", lambda name: Fake(name, "no" if name in names else None))

    return use


def attended_by(chosen, max_query_len: int, *, is_recorded: bool = False, seen_ends: torch.Tensor | None = None) -> str:
    metadata = AttentionMetadata(
        None, None, None, max_query_len=max_query_len, max_seq_len=9, is_recorded=is_recorded, seen_ends=seen_ends
    )
    return chosen.attend(None, None, None, metadata, scale=1.0, window=0)


def test_each_phase_uses_the_best_capable_backend(refusing) -> None:
    refusing("cpu")
    chosen = backends.choose_attention("auto", SPEC)
    assert isinstance(chosen, PerPhaseAttention)
    assert attended_by(chosen, 1) == "triton"
    assert attended_by(chosen, 2) == "flash_attn"
    assert attended_by(chosen, 2, is_recorded=True) == "triton"
    assert chosen.records_decodes
    assert chosen.records_chunks
    assert chosen.rows_per_prefix_tile(SPEC) == 32


def test_one_backend_may_serve_both(refusing) -> None:
    refusing("cpu", "flash_attn")
    chosen = backends.choose_attention("auto", SPEC)
    assert chosen.name == "triton"
    refusing("cpu", "flash_attn", "triton", "flash_attn_2")
    assert backends.choose_attention("auto", SPEC).name == "reference"


def test_flash_attn_2_is_preferred_on_its_gpus(refusing) -> None:
    """It also replaces kernels that are missing; it is not considered if flash-attn-4 is usable."""
    refusing("cpu", "flash_attn")
    assert attended_by(backends.choose_attention("auto", PAGED), 2) == "flash_attn_2"
    assert attended_by(backends.choose_attention("auto", PAGED), 1) == "triton"
    assert attended_by(backends.choose_attention("auto", replace(PAGED, capability=(9, 0))), 2) == "triton"
    refusing("cpu", "flash_attn", "triton")
    assert attended_by(backends.choose_attention("auto", replace(PAGED, capability=(9, 0))), 1) == "flash_attn_2"


def test_a_named_backend_serves_both(refusing) -> None:
    refusing()
    assert backends.choose_attention("flash_attn", SPEC).name == "flash_attn"


def test_draft_trees_use_backends_that_support_them(refusing) -> None:
    refusing("cpu")
    with_trees = replace(SPEC, has_trees=True)
    chosen = backends.choose_attention("auto", with_trees)
    assert chosen.name == "triton"
    assert chosen.records_chunks
    with pytest.raises(InvalidArgument, match="flash_attn does not support this model: does not support trees"):
        backends.choose_attention("flash_attn", with_trees)


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_declares_tree_support(name: str) -> None:
    backend = backends.load_backend(name)
    refused = backends.reject_reason_of(backend, replace(SPEC, has_trees=True))
    says_trees = "does not support trees of drafts"
    assert (refused == says_trees) == (name in ("flash_attn", "flash_attn_2", "batch_invariant"))


def test_pictures_use_a_backend_of_their_own_and_text_the_fastest(refusing) -> None:
    refusing("cpu")
    chosen = backends.choose_attention("auto", replace(SPEC, sees_ahead=True))
    plain = backends.choose_attention("auto", SPEC)
    for max_query_len in (1, 9):
        assert attended_by(chosen, max_query_len) == attended_by(plain, max_query_len)
    assert attended_by(plain, 9) == "flash_attn"
    assert attended_by(chosen, 9, seen_ends=torch.zeros(9)) == "triton"
    with pytest.raises(
        InvalidArgument, match="flash_attn does not support this model: does not support attention in both"
    ):
        backends.choose_attention("flash_attn", replace(SPEC, sees_ahead=True))


def test_one_backend_for_all_computes_pictures_too(refusing) -> None:
    refusing("cpu", "flash_attn", "flash_attn_2")
    chosen = backends.choose_attention("auto", replace(SPEC, sees_ahead=True))
    assert attended_by(chosen, 9, seen_ends=torch.zeros(9)) == "triton"
    assert not isinstance(chosen, PerPhaseAttention)


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_declares_whether_pictures_see_ahead(name: str) -> None:
    refused = backends.reject_reason_of(backends.load_backend(name), replace(SPEC, sees_ahead=True))
    expected = name in ("flash_attn", "flash_attn_2", "batch_invariant")
    assert (refused == "does not support attention in both directions within pictures") == expected


# ---------------------------------------------------------------- packages

ON_PAPER = "from tests.services.worker.attention.fake_flash_attn import *"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Installs a flash-attn of some version with the functions of fake_flash_attn."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]

    def install(version: str, interface: str = ON_PAPER) -> Path:
        described = tmp_path / f"flash_attn-{version}.dist-info" / "METADATA"
        described.parent.mkdir()
        described.write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n")
        folder = tmp_path / "flash_attn"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "flash_attn_interface.py").write_text(interface)
        monkeypatch.syspath_prepend(tmp_path)
        forget()
        return folder

    yield install
    forget()


def reason(name: str, spec: AttentionSpec) -> str | None:
    return backends.load_backend(name).reject_reason(spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu"}, "runs on CUDA, not on cpu"),
        ({"capability": (7, 5)}, "needs compute capability 8.0, not 7.5"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "supports bfloat16 and float16, not float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "does not support a KV cache of float8_e4m3fn"),
        ({"has_chunked_windows": True}, "supports sliding windows, not chunks"),
        ({"head_dim": 260}, "supports head sizes that are multiples of 8 up to 256, not 260"),
        ({"head_dim": 36}, "supports head sizes that are multiples of 8 up to 256, not 36"),
        ({"block_size": 128}, "supports block sizes that are multiples of 256, not 128"),
        ({"block_size": 64}, "supports block sizes that are multiples of 256, not 64"),
    ],
)
def test_flash_attn_2_reports_unsupported_features(package, change: dict[str, Any], words: str) -> None:
    package("2.8.3")
    assert reason("flash_attn_2", PAGED) is None
    assert reason("flash_attn_2", replace(PAGED, **change)) == words


@pytest.mark.parametrize("version", ["2.8.0", "2.8.3.post2", "2.8.3+cu13torch2.11"])
def test_versions_of_flash_attn_2_with_its_interface(package, version: str) -> None:
    package(version)
    assert (
        reason("flash_attn_2", replace(PAGED, block_size=512, head_dim=80, dtype="float16", kv_dtype="float16")) is None
    )


@pytest.mark.parametrize("version", ["1.0.9", "2.5.9.post1", "2.7.4", "3.0.0"])
def test_versions_of_flash_attn_2_without_it(package, version: str) -> None:
    package(version)
    assert reason("flash_attn_2", PAGED) == f"needs flash-attn 2.8 or a later 2, not {version}"


def test_package_built_for_another_gpu(package) -> None:
    package("2.8.3", 'raise ImportError("undefined symbol: _ZN3c105ErrorC2E")')
    assert reason("flash_attn_2", PAGED) == "flash-attn 2.8.3 cannot be loaded: undefined symbol: _ZN3c105ErrorC2E"


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.load_backend("flash_attn_2")
    monkeypatch.setattr(sys, "path", [])
    assert backend.reject_reason(PAGED) == "flash-attn is not installed"


def test_flash_attn_cute_of_flash_attn_2_is_not_flash_attn_4(package) -> None:
    """It has the same path but another signature, and does not load beside the cutlass DSL of flash-attn-4."""
    cute = package("2.8.3") / "cute"
    cute.mkdir()

    def reason_with(interface: str) -> str | None:
        (cute / "interface.py").write_text(interface)
        for name in ("flash_attn.cute.interface", "flash_attn.cute"):
            sys.modules.pop(name, None)
        return reason("flash_attn", SPEC)

    assert "flash_attn.cute is older" in str(reason_with("def flash_attn_varlen_func(q, k, v, page_table=None): ..."))
    missing = "module 'cutlass.cute.core' has no attribute 'ThrMma'"
    assert missing in str(reason_with(f'raise AttributeError("{missing}")'))
    assert reason_with("def flash_attn_varlen_func(q, k, v, page_table=None, num_splits=1): ...") is None


def test_placeholder_block_size_is_accepted(package) -> None:
    package("2.8.3")
    assert reason("flash_attn_2", replace(PAGED, block_size=backends.BLOCK_SIZES["flash_attn_2"])) is None


# ---------------------------------------------------------------- attention

LENS = [700, 1, 256, 513, 300]
DECODE = [(0, 699, 700), (1, 0, 1), (2, 255, 256), (3, 512, 513)]
MIXED = [(0, 300, 700), (1, 0, 1), (2, 0, 256), (3, 511, 513), (4, 299, 300)]


def assert_attends(backend: AttentionBackend, case: Case, rows: Rows, window: int) -> None:
    q, k_cache, v_cache, tables, query_start, seq_lens = case.step(rows)
    metadata = AttentionMetadata(
        tables,
        query_start,
        seq_lens,
        max_query_len=max(end - begin for _, begin, end in rows),
        max_seq_len=max(end for _, _, end in rows),
    )
    got = backend.attend(q, k_cache, v_cache, metadata, scale=case.scale, window=window)
    assert_close(got, case.exact(rows, window))


def paged_case(block_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str) -> Case:
    """Builds a case as in the worker: unowned positions are zero."""
    torch.manual_seed(0)
    case = Case(LENS, heads, head_dim, block_size, dtype, torch.device(device))
    for cache in (case.paged.k_cache, case.paged.v_cache):
        cache.nan_to_num_(0.0)
    return case


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [0, 50])
def test_flash_attn_2_arguments(package, rows: Rows, window: int) -> None:
    package("2.8.3")
    backend = backends.load_backend("flash_attn_2")
    assert backend.reject_reason(PAGED) is None
    case = paged_case(256, (4, 2), 16, torch.float16, "cpu")
    for step in (rows, rows[1:]):
        assert_attends(backend, case, step, window)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["triton", "flash_attn", "flash_attn_2"])
def test_attention_on_a_gpu(name: str, head_dim: int, window: int, rows: Rows) -> None:
    spec = replace(
        SPEC,
        head_dim=head_dim,
        block_size=backends.BLOCK_SIZES.get(name, SPEC.block_size),
        has_window=bool(window),
        capability=torch.cuda.get_device_capability(),
    )
    backend = backends.load_backend(name)
    refused = backend.reject_reason(spec)
    if refused:
        pytest.skip(refused)
    case = paged_case(spec.block_size, (spec.num_q_heads, spec.num_kv_heads), head_dim, torch.bfloat16, "cuda")
    assert_attends(backend, case, rows, window)
