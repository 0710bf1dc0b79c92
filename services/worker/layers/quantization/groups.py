"""Sorts columns by quantization group for checkpoints with act-order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight


def grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None, *, group_size: int, bits: int
) -> QuantizedWeight:
    """Builds a weight with contiguous groups, sorting its columns by group if they are not (act-order).

    codes [out_features, in_features]; scales, zeros [out_features, groups]; `groups`: int32 [in_features] of each
    column, or None if they are contiguous. The weight's `order` then permutes inputs alike.
    """
    import torch

    from quire.kernels.reference.quantized_linear import QuantizedWeight

    order = None
    if groups is not None:
        plain = torch.arange(len(groups), device=groups.device) // group_size
        if not torch.equal(groups.long(), plain):
            order = groups.argsort(stable=True)
            codes = codes[:, order]
    return QuantizedWeight(codes, scales, zeros, group_size=group_size, bits=bits, order=order)
