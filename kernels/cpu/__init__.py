"""The functions of kernels in compiled C++ (build.py), for CPUs. README.md: how a row keeps its bits in any batch."""

from kernels.cpu.functions import (
    add_rms_norm,
    embed,
    linear,
    mask_logits,
    paged_attention,
    prepare_linear,
    qk_norm_rope_store,
    rms_norm,
    sample,
    silu_mul,
)
from kernels.cpu.native import ends_of_matches, num_threads, prefer_huge_pages, set_num_threads, unavailable

__all__ = [
    "add_rms_norm",
    "embed",
    "ends_of_matches",
    "linear",
    "mask_logits",
    "num_threads",
    "paged_attention",
    "prefer_huge_pages",
    "prepare_linear",
    "qk_norm_rope_store",
    "rms_norm",
    "sample",
    "set_num_threads",
    "silu_mul",
    "unavailable",
]
