"""Activations of feed-forward layers by their names in config.json. silu has its own kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import LayerPlacement

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
QUICK_GELU = "quick_gelu"  # of CLIP
KNOWN = (*SILU, *GELU_TANH, QUICK_GELU, "gelu", "relu")


def activate(name: str, place: LayerPlacement) -> Callable[[Tensor], Tensor]:
    """Returns the elementwise activation `name`, one of KNOWN.

    Raises InvalidArgument if batch invariance is required and torch computes it otherwise on the CPU.
    """
    if place.batch_invariant and place.device.type == "cpu" and name != "relu":
        text = f"batch_invariant: {name} is computed by torch on the CPU, other for a tensor's last elements"
        raise InvalidArgument(text, field="batch_invariant")
    from torch.nn import functional  # lazy: families are also read without torch

    if name in SILU:
        return functional.silu
    if name == "relu":
        return functional.relu
    if name == QUICK_GELU:
        return lambda x: x * (1.702 * x).sigmoid()
    return partial(functional.gelu, approximate="tanh" if name in GELU_TANH else "none")


def gated(name: str, place: LayerPlacement) -> Callable[[Tensor], Tensor]:
    """Returns a function of x [num_tokens, 2 * size]: activation `name` of the first half times the second.

    Raises InvalidArgument as activate().
    """
    act = activate(name, place)

    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return act(first).mul_(second)

    return gate
