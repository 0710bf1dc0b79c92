"""Attention by flash-attn 2 (github.com/Dao-AILab/flash-attention, arXiv 2307.08691), if it is installed.

Its kernels target Ampere: on an H200 torch's copy of them computes prompts at 221 to 323 TFLOP/s, this project's
kernels reach 362 to 536; with 2.8.3 for both phases the 0.6B shape decodes at 0.86 of the speed. Pages have to be
multiples of 256 positions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec

PACKAGE = "flash-attn"
PAGE = 256
MIN_CAPABILITY = (8, 0)
MIN_VERSION = (2, 8)
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8


class FlashAttention2:
    """Calls flash_attn_varlen_func for chunks and flash_attn_with_kvcache, which splits keys, for decodes."""

    records_decodes = True
    records_chunks = False  # splits and grids depend on lengths passed by the host

    def __init__(self) -> None:
        self._package: Any = None
        self._starts: tuple[AttentionMetadata, Tensor] | None = None  # cumulative key lengths, by step

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 0

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why the package cannot serve `spec`, or None; imports the package at acceptance."""
        return _reject_reason(spec) or self._load()

    def _load(self) -> str | None:
        """Imports the package and stores it; returns why that is impossible (absent, other version, fails to import),
        or None."""
        try:
            version = importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            return f"{PACKAGE} is not installed"
        if not MIN_VERSION <= _version_numbers(version) < (MIN_VERSION[0] + 1,):
            return f"needs {PACKAGE} {_version_text(MIN_VERSION)} or a later 2, not {version}"
        try:
            self._package = importlib.import_module("flash_attn.flash_attn_interface")
        except Exception as error:  # e.g. built for another torch version
            return f"{PACKAGE} {version} cannot be loaded: {error}"
        return None

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        chunked: bool = False,
    ) -> Tensor:
        """Calls the decode or the chunk function of the package; supports no sinks, soft caps, chunked windows or tree
        masks."""
        assert sinks is None
        assert not softcap
        assert not chunked
        options: dict[str, Any] = {
            "block_table": metadata.block_tables,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
        }
        if metadata.is_decode:
            lens = metadata.seq_lens
            rows: Tensor = self._package.flash_attn_with_kvcache(
                q.unsqueeze(1), k_cache, v_cache, cache_seqlens=lens, **options
            ).squeeze(1)
            return rows
        attended: Tensor = self._package.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=self._key_starts(metadata),
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            **options,
        )
        return attended

    def _key_starts(self, metadata: AttentionMetadata) -> Tensor:
        """Returns cumulative key lengths, int32 [num_rows + 1]; computed once a step and shared by all layers."""
        if self._starts is None or self._starts[0] is not metadata:
            lens = metadata.seq_lens
            starts = torch.zeros(lens.size(0) + 1, dtype=torch.int32, device=lens.device)
            torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
            self._starts = metadata, starts
        return self._starts[1]


def _reject_reason(spec: AttentionSpec) -> str | None:
    """Returns the first requirement of `spec` that the package does not meet, or None; needs no package."""
    heads = f"supports head sizes that are multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, not {spec.head_dim}"
    needs = f"needs compute capability {_version_text(MIN_CAPABILITY)}, not {_version_text(spec.capability)}"
    faults = (
        (spec.device != "cuda", f"runs on CUDA, not on {spec.device}"),
        (spec.capability < MIN_CAPABILITY, needs),
        (spec.dtype not in DTYPES, f"supports {' and '.join(DTYPES)}, not {spec.dtype}"),
        (spec.kv_dtype != spec.dtype, f"does not support a KV cache of {spec.kv_dtype}"),
        (spec.has_sinks, "does not support attention sinks"),
        (spec.has_softcap, "does not support soft caps"),
        (spec.has_chunked_windows, "supports sliding windows, not chunks"),
        (spec.head_dim > MAX_HEAD_DIM or spec.head_dim % HEAD_DIM_STEP, heads),
        (spec.block_size % PAGE, f"supports block sizes that are multiples of {PAGE}, not {spec.block_size}"),
    )
    return next((reason for wrong, reason in faults if wrong), None)


def _version_numbers(version: str) -> tuple[int, ...]:
    """Parses major and minor version: (2, 8) for 2.8.3.post2."""
    return tuple(int(part) for part in version.split(".")[:2])


def _version_text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
