"""Functions that model code calls on a device, each in several versions of one name and signature.

`reference` is plain torch: it defines the meaning of every function, runs on any device, and the faster packages are
tested against it. A faster package need not have every function: `load` takes each from the first package that has it.

A package offers any of FUNCTIONS, and `unavailable() -> str | None`: why none of them can run on this machine (the
extension is not built, the CPU lacks an instruction), or None. Some functions come together: `prepare_linear` and
`linear`; `prepare_quantized_linear` and `quantized_linear`; `prepare_experts` and `experts`; `prepare_head_linear` and
`head_linear`; `prepare_low_rank`, `put_low_rank`, `add_low_rank` and `embed_low_rank`; `best_of_part` and
`best_of_parts`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the build of the kernels has no torch
    from torch import Tensor

FUNCTIONS = (
    "prepare_linear",
    "linear",
    "prepare_low_rank",
    "put_low_rank",
    "add_low_rank",
    "embed_low_rank",
    "prepare_quantized_linear",
    "quantized_linear",
    "route",
    "prepare_experts",
    "experts",
    "embed",
    "rms_norm",
    "add_rms_norm",
    "qk_norm_rope_store",
    "paged_attention",
    "latent_store",
    "prepare_head_linear",
    "head_linear",
    "latent_attention",
    "ragged_attention",
    "rotate_pairs",
    "short_convolution",
    "gated_delta_rule",
    "gated_norm",
    "state_space_scan",
    "silu_mul",
    "sample",
    "best_of_part",
    "best_of_parts",
    "digit_sums",
    "mask_logits",
    "log_softmax",
)

# By device type, fastest first. Imported only for that device.
PACKAGES: dict[str, tuple[str, ...]] = {
    "cpu": ("quire.kernels.cpu", "quire.kernels.reference"),
    "cuda": ("quire.kernels.triton", "quire.kernels.reference"),
}

# Batch-invariant packages; the reference is used for functions that it computes row by row.
BATCH_INVARIANT: dict[str, tuple[str, ...]] = {
    "cpu": PACKAGES["cpu"],
    "cuda": ("quire.kernels.triton.batch_invariant", *PACKAGES["cuda"]),
}


@dataclass(frozen=True)
class Ops:
    """One implementation of every function. Shapes, dtypes and meaning: the docstrings in kernels/reference."""

    prepare_linear: Callable[[Tensor, Tensor | None], Any]
    linear: Callable[[Tensor, Any], Tensor]
    prepare_low_rank: Callable[..., Any]
    put_low_rank: Callable[..., None]
    add_low_rank: Callable[..., None]
    embed_low_rank: Callable[..., None]
    prepare_quantized_linear: Callable[..., Any]
    quantized_linear: Callable[[Tensor, Any], Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    prepare_experts: Callable[..., Any]
    experts: Callable[..., Tensor]
    embed: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    qk_norm_rope_store: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    latent_store: Callable[..., None]
    prepare_head_linear: Callable[[Tensor], Any]
    head_linear: Callable[[Tensor, Any], Tensor]
    latent_attention: Callable[..., Tensor]
    ragged_attention: Callable[..., Tensor]
    rotate_pairs: Callable[[Tensor, Tensor], None]
    short_convolution: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    state_space_scan: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    best_of_part: Callable[..., Tensor]
    best_of_parts: Callable[[Tensor], Tensor]
    digit_sums: Callable[..., Tensor]
    mask_logits: Callable[..., None]
    log_softmax: Callable[[Tensor], Tensor]
    sources: dict[str, str]  # function -> package of its implementation
    refused: dict[str, str]  # package -> why it was not used


def load(device: str, packages: tuple[str, ...] = ()) -> Ops:
    """Returns the fastest functions for `device` ("cpu" or "cuda"), each from the first usable package that has it, or
    from `packages` in that order. Packages that cannot run here are listed with reasons in Ops.refused."""
    refused: dict[str, str] = {}
    usable: list[ModuleType] = []
    for name in packages or PACKAGES[device]:
        module, reason = find(name)
        if module is None:
            refused[name] = reason
        else:
            usable.append(module)
    chosen = {function: next(m for m in usable if callable(getattr(m, function, None))) for function in FUNCTIONS}
    return Ops(
        **{function: getattr(module, function) for function, module in chosen.items()},
        sources={function: module.__name__ for function, module in chosen.items()},
        refused=refused,
    )


def set_num_threads(ops: Ops, count: int) -> None:
    """Sets the number of CPU threads.

    A compiled package has its own pool; torch's would spin in parallel and take the cores away (measured: 27.7 s
    instead of 2.4 s for one file of tests).
    """
    pools = [find(package)[0] for package in set(ops.sources.values())]
    import torch

    own = [module for module in pools if hasattr(module, "set_num_threads")]
    for module in own:
        module.set_num_threads(count)
    torch.set_num_threads(1 if own else count)


def find(package: str) -> tuple[ModuleType | None, str]:
    """Imports a package; returns it if its functions can run here, else None and the reason. Raises no error for a
    missing package."""
    try:
        module = importlib.import_module(package)
        reason = module.unavailable()
    except (ImportError, AttributeError) as error:
        return None, str(error)
    return (None, reason) if reason else (module, "")
