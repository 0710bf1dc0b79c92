"""Definition of every function of kernels in plain torch, for any device."""

from quire.kernels.reference.activation import silu_mul
from quire.kernels.reference.attention.attention_inputs import qk_norm_rope_store
from quire.kernels.reference.attention.latent_attention import (
    head_linear,
    latent_attention,
    latent_store,
    prepare_head_linear,
)
from quire.kernels.reference.attention.paged_attention import paged_attention
from quire.kernels.reference.attention.ragged_attention import ragged_attention
from quire.kernels.reference.attention.rotate_pairs import rotate_pairs
from quire.kernels.reference.embedding import embed
from quire.kernels.reference.experts import experts, prepare_experts, route
from quire.kernels.reference.linear import linear, prepare_linear
from quire.kernels.reference.low_rank import add_low_rank, embed_low_rank, prepare_low_rank, put_low_rank
from quire.kernels.reference.quantized_linear import prepare_quantized_linear, quantized_linear
from quire.kernels.reference.recurrent.gated_delta_rule import gated_delta_rule
from quire.kernels.reference.recurrent.gated_norm import gated_norm
from quire.kernels.reference.recurrent.short_convolution import short_convolution
from quire.kernels.reference.recurrent.state_space_scan import state_space_scan
from quire.kernels.reference.rms_norm import add_rms_norm, rms_norm
from quire.kernels.reference.sampling.digit_sums import digit_sums
from quire.kernels.reference.sampling.log_softmax import log_softmax
from quire.kernels.reference.sampling.noise import gumbel_noise
from quire.kernels.reference.sampling.part_sampling import best_of_part, best_of_parts
from quire.kernels.reference.sampling.sampling import sample
from quire.kernels.reference.sampling.token_mask import mask_logits


def unavailable() -> str | None:
    return None


__all__ = [
    "add_low_rank",
    "add_rms_norm",
    "best_of_part",
    "best_of_parts",
    "digit_sums",
    "embed",
    "embed_low_rank",
    "experts",
    "gated_delta_rule",
    "gated_norm",
    "gumbel_noise",
    "head_linear",
    "latent_attention",
    "latent_store",
    "linear",
    "log_softmax",
    "mask_logits",
    "paged_attention",
    "prepare_experts",
    "prepare_head_linear",
    "prepare_linear",
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
