"""Activations of feed-forward layers, by the names of config.json. silu has kernels of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
KNOWN = (*SILU, *GELU_TANH, "gelu", "relu")


def activate(name: str) -> Callable[[Tensor], Tensor]:
    """`name`: one of KNOWN."""
    from torch.nn import functional  # here: families are also read where there is no torch

    if name in SILU:
        return functional.silu
    if name == "relu":
        return functional.relu
    return partial(functional.gelu, approximate="tanh" if name in GELU_TANH else "none")


def gated(name: str) -> Callable[[Tensor], Tensor]:
    """Of [num_tokens, 2 * size]: the first half, activated, times the second."""
    act = activate(name)

    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return act(first).mul_(second)

    return gate
