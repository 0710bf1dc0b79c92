"""The functions of kernels in Triton, for CUDA devices. Meaning, shapes and dtypes: kernels/reference."""

from __future__ import annotations

import torch

from quire.kernels.capability import SM80
from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.attention.attention_inputs import qk_norm_rope_store
from quire.kernels.triton.attention.latent_blocks import latent_attention
from quire.kernels.triton.attention.latent_inputs import latent_store
from quire.kernels.triton.attention.paged_attention import paged_attention
from quire.kernels.triton.attention.ragged_attention import ragged_attention
from quire.kernels.triton.attention.rotate_pairs import rotate_pairs
from quire.kernels.triton.low_rank import add_low_rank, embed_low_rank
from quire.kernels.triton.low_rank_table import prepare_low_rank, put_low_rank
from quire.kernels.triton.moe.expert_layers import experts, prepare_experts
from quire.kernels.triton.moe.routing import route
from quire.kernels.triton.quantization.quantized_linear import prepare_quantized_linear, quantized_linear
from quire.kernels.triton.recurrent.gated_delta_rule import gated_delta_rule
from quire.kernels.triton.recurrent.gated_norm import gated_norm
from quire.kernels.triton.recurrent.short_convolution import short_convolution
from quire.kernels.triton.recurrent.state_space_scan import state_space_scan
from quire.kernels.triton.rms_norm import add_rms_norm, rms_norm
from quire.kernels.triton.sampling.digit_sums import digit_sums
from quire.kernels.triton.sampling.part_sampling import best_of_part, best_of_parts
from quire.kernels.triton.sampling.sampling import sample
from quire.kernels.triton.sampling.token_mask import mask_logits

MIN_CAPABILITY = SM80  # bfloat16 in matrix instructions


def unavailable() -> str | None:
    """Returns why no kernel can run here (no CUDA device, or one below compute capability 8.0), or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


__all__ = [
    "add_low_rank",
    "add_rms_norm",
    "best_of_part",
    "best_of_parts",
    "digit_sums",
    "embed_low_rank",
    "experts",
    "gated_delta_rule",
    "gated_norm",
    "latent_attention",
    "latent_store",
    "mask_logits",
    "paged_attention",
    "prepare_experts",
    "prepare_low_rank",
    "prepare_quantized_linear",
    "put_low_rank",
    "qk_norm_rope_store",
    "quantized_linear",
    "ragged_attention",
    "rms_norm",
    "rotate_pairs",
    "route",
    "sample",
    "short_convolution",
    "silu_mul",
    "state_space_scan",
    "unavailable",
]
