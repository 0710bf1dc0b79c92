"""Checks for the option batch_invariant: a sequence's output does not depend, to the bit, on its batch.

Every kernel has to give a row the same bits for any rows, chunks and steps around it, and load must not influence
tokens. This module decides which functions qualify and which settings are rejected; attention backends decide for
themselves (AttentionSpec.batch_invariant).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.settings import WorkerSettings

SETTING = "batch_invariant"
COMPILED_DTYPES = (torch.float32, torch.bfloat16)
TORCH_PACKAGE = "quire.kernels.reference"
# Functions that plain torch may implement, by device: row-independent ones, and those never called.
UNUSED_OPS = frozenset({"prepare_quantized_linear", "quantized_linear", "ragged_attention", "rotate_pairs"})
# Only called with adapters, with latent attention, and with recurrent layers.
ADAPTER_OPS = frozenset({"add_low_rank", "prepare_low_rank", "put_low_rank"})
LATENT_OPS = frozenset({"head_linear", "latent_attention", "latent_store", "prepare_head_linear"})
RECURRENT_OPS = frozenset({"gated_delta_rule", "gated_norm", "short_convolution", "state_space_scan"})
ROW_INDEPENDENT_OPS = {
    "cpu": frozenset({"best_of_part", "best_of_parts", "digit_sums", "log_softmax"}) | UNUSED_OPS,
    "cuda": frozenset({"embed"}) | UNUSED_OPS,
}
PACKAGE = {"cpu": "quire.kernels.cpu", "cuda": "quire.kernels.triton"}  # required package by device


def check(
    settings: WorkerSettings,
    place: LayerPlacement,
    drafting: SpeculativeConfig | None,
    *,
    is_latent: bool = False,
    is_recurrent: bool = False,
) -> None:
    """Raises InvalidArgument for settings that exclude the option, FailedPrecondition if kernels are missing.

    `is_latent`: the model caches latent vectors; `is_recurrent`: it has recurrent layers.
    """
    ops = place.ops
    for reason in _excluded(settings, place, drafting, is_latent):
        raise InvalidArgument(f"{SETTING}: {reason}", field=SETTING)
    by_torch = {name for name, source in ops.sources.items() if source == TORCH_PACKAGE} - ROW_INDEPENDENT_OPS[
        settings.device
    ]
    if not settings.lora:
        by_torch -= ADAPTER_OPS
    if not is_latent:
        by_torch -= LATENT_OPS
    if not is_recurrent:
        by_torch -= RECURRENT_OPS
    if by_torch:
        package = PACKAGE[settings.device]
        reason = ops.refused.get(package, f"{package} has no {min(by_torch)}")
        raise FailedPrecondition(
            f"{SETTING}: requires the compiled kernels, because sums of plain torch depend on the batch size; they "
            f"are missing: {reason}",
            field=SETTING,
        )


def _excluded(
    settings: WorkerSettings, place: LayerPlacement, drafting: SpeculativeConfig | None, is_latent: bool
) -> Iterator[str]:
    """Yields the reasons why the settings exclude the option; none if they do not."""
    if drafting is not None and drafting.rejection_sample_method == "standard":
        yield (
            "with rejection_sample_method standard (speculative_config) a text depends on the number of drafts, "
            "which depends on the load; "
            "use coupled"
        )
    if settings.device == "cpu" and place.dtype not in COMPILED_DTYPES:
        name = str(place.dtype).removeprefix("torch.")
        yield f"dtype {name} is computed by torch on the CPU, whose sums depend on the batch; use bfloat16 or float32"
    if settings.device == "cuda" and is_latent:
        yield "latent attention on a GPU is split by the number of keys and rows; use a CPU"
    if settings.device == "cuda" and settings.quantization != "none":
        yield f"quantization {settings.quantization} splits its products by the number of rows; use none"
    if settings.device == "cuda" and place.checkpoint is not None:
        yield f"products of {place.checkpoint.method} are split by the number of rows; use an unquantized checkpoint"
    if settings.device == "cuda" and settings.logprobs_mode.startswith("processed"):
        yield f"logprobs_mode {settings.logprobs_mode} is filtered by torch, whose sums on a GPU depend on the batch"
