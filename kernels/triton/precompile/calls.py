"""Calls of all kernels in a model's graphs; each kernel's module yields its own."""

from __future__ import annotations

import importlib

from quire.kernels.triton.precompile.shapes import Calls, ModelShape

PACKAGE = "quire.kernels.triton"
# Modules with a `precompile_calls(shape)`, below PACKAGE, longest compilation first. Kernels of
# other modules are compiled at their first call.
MODULES = (
    "moe.expert_layers",
    "batch_invariant.expert_layers",
    "batch_invariant.sampling",
    "batch_invariant.attention",
    "quantization.warp_groups",
    "single_row.packed_row_linear",
    "quantization.packed_linear",
    "low_rank",
    "single_row.row_low_rank",
    "sampling.filtered_sampling",
    "attention.latent_blocks",
    "attention.shared_prefix",
    "single_row.row_attention",
    "single_row.row_experts",
    "attention.combine",
    "attention.chunk_attention",
    "attention.decode_attention",
    "attention.latent_inputs",
    "attention.attention_inputs",
    "sampling.sampling",
    "sampling.part_sampling",
    "sampling.digit_sums",
    "rms_norm",
    "activation",
    "step_edges",
    "sampling.token_mask",
    "moe.routing",
    "batch_invariant.log_softmax",
    "batch_invariant.linear",
    "single_row.row_linear",
)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields calls for a model of this shape, with arguments that have no memory."""
    for name in MODULES:
        yield from importlib.import_module(f"{PACKAGE}.{name}").precompile_calls(shape)
