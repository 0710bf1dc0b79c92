"""Functions of kernels in compiled C++ (build.py), for CPUs; docs/design/cpu-kernels.md explains batch invariance."""

from __future__ import annotations

import importlib
from typing import Any

ADAPTER_OPS = ("add_low_rank", "embed_low_rank", "prepare_low_rank", "put_low_rank")
OF_EXPERTS = ("experts", "prepare_experts", "route")
LATENT_OPS = ("head_linear", "latent_attention", "latent_store", "prepare_head_linear")
RECURRENT_OPS = ("gated_delta_rule", "gated_norm", "short_convolution", "state_space_scan")
OF_QUANTIZED = ("prepare_quantized_linear", "quantized_linear")
OF_NATIVE = ("ends_of_matches", "num_threads", "populate", "prefer_huge_pages", "set_num_threads", "unavailable")

__all__ = [
    "add_low_rank",
    "add_rms_norm",
    "embed",
    "embed_low_rank",
    "ends_of_matches",
    "experts",
    "gated_delta_rule",
    "gated_norm",
    "head_linear",
    "latent_attention",
    "latent_store",
    "linear",
    "mask_logits",
    "num_threads",
    "paged_attention",
    "populate",
    "prefer_huge_pages",
    "prepare_experts",
    "prepare_head_linear",
    "prepare_linear",
    "prepare_low_rank",
    "prepare_quantized_linear",
    "put_low_rank",
    "qk_norm_rope_store",
    "quantized_linear",
    "rms_norm",
    "route",
    "sample",
    "set_num_threads",
    "short_convolution",
    "silu_mul",
    "state_space_scan",
    "unavailable",
]


def __getattr__(name: str) -> Any:
    """Imports the module of a function on first use: build.py and first_start.py run without torch. Raises
    AttributeError for names not in __all__."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {
        "native": OF_NATIVE,
        "expert_layers": OF_EXPERTS,
        "latent_layers": LATENT_OPS,
        "low_rank": ADAPTER_OPS,
        "quantized_layers": OF_QUANTIZED,
        "recurrent_layers": RECURRENT_OPS,
    }
    module = next((module for module, names in modules.items() if name in names), "functions")
    return getattr(importlib.import_module(f"quire.kernels.cpu.{module}"), name)
