"""Attention by the package flash-attn-4 (github.com/Dao-AILab/flash-attention) on Hopper GPUs.

Measured on an H200 with 4.0.0b36: prompts of 4,096 tokens run at 575-626 TFLOP/s, this project's own kernel at 484-503.
It does not split keys on Hopper, so one long sequence decodes four times slower than with `triton`: auto selects it for
prompts and chunks only.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.kernels.capability import SM90
from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec

if TYPE_CHECKING:  # reject_reason() also runs without torch
    from torch import Tensor

PACKAGE = "flash-attn-4"
HEAD_DIMS = (64, 96, 128)
LONG_QUERY = 1024  # passed for every chunk: a short maximum would compile another variant while serving


class FlashAttention:
    """Calls flash_attn_varlen_func over KV pages; pages of 128 positions use the copy engine, other sizes slower
    copies."""

    records_decodes = records_chunks = False  # host side takes 57 us a call and compiles on first use

    def __init__(self) -> None:
        self._attend: Any = None

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 0

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why the package cannot serve `spec`, or None; imports the package at acceptance.

        Sets the environment variables of its compile cache and ignores one of its warnings before the import.
        """
        if spec.device != "cuda" or spec.capability[0] != SM90[0]:
            return "runs on Hopper GPUs"
        if spec.dtype == "float32" or spec.head_dim not in HEAD_DIMS:
            return f"supports 16-bit heads of {HEAD_DIMS}, not {spec.dtype} of {spec.head_dim}"
        lacking = _reject_reason(spec)
        if lacking:
            return lacking
        _use_compile_cache()
        warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # emitted by the package for every variant
        try:
            found = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
        except Exception as error:  # flash-attn 2 with a newer cutlass DSL raises more than ImportError
            return f"flash-attn-4 is not installed, or is incomplete: {error}"
        if "num_splits" not in inspect.signature(found).parameters:
            return (
                "flash-attn-4 is not installed, or flash-attn 2 was installed over it, whose flash_attn.cute is older"
            )
        self._attend = found
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
        """Calls the package for decodes and chunks alike; supports no sinks, soft caps, chunked windows or tree
        masks."""
        assert sinks is None
        assert not softcap
        assert not chunked
        out = self._attend(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.query_start,
            seqused_k=metadata.seq_lens,
            page_table=metadata.block_tables,
            max_seqlen_q=max(metadata.max_query_len, LONG_QUERY),
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (None, None),
            num_splits=1,
            pack_gqa=True,  # without it a decode row in a chunk step costs 1.5 to 2.7 times as much
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended


def _use_compile_cache() -> None:
    """Sets the package's environment variables so that compiled kernels (2 to 3 s each) are kept in the user's cache
    directory.

    The package's default is a predictable name in /tmp. Values set by the user stay; without a writable directory
    kernels are compiled at every start.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "quire" / "flash-attn-4"
    with contextlib.suppress(OSError):  # no writable directory: compiled at every start
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _reject_reason(spec: AttentionSpec) -> str | None:
    """Returns the first feature of `spec` that the package lacks on Hopper, or None."""
    faults = (
        (spec.has_sinks, "does not support attention sinks"),
        (spec.has_softcap, "does not support soft caps"),
        (spec.has_chunked_windows, "supports sliding windows, not chunks"),
        (spec.kv_dtype != spec.dtype, f"does not support a KV cache of {spec.kv_dtype} on Hopper GPUs"),
    )
    return next((reason for wrong, reason in faults if wrong), None)
