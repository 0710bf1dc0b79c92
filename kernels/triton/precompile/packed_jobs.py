"""The jobs of jobs.py that only checkpoints with weights of 4 bits have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from triton.runtime import driver

from quire.kernels.triton.precompile.precompile import ModelShape, PackedShape
from quire.kernels.triton.quantization import warp_groups
from quire.kernels.triton.quantization.packed_linear import MOST_ROWS, MOST_TILED_ROWS, ROWS, packed_linear, widened
from quire.kernels.triton.quantization.packed_weight import PackedWeight, span_of
from quire.kernels.triton.quantization.warp_groups import WarpGroupsCut, kernel_of_warp_groups, warp_groups_take
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear


def packed_jobs(model: ModelShape, packed: PackedShape, pdl: Callable[[], bool]) -> Iterator[Callable[[], object]]:
    """`pdl`: whether the GPU has programmatic dependent launch. Weights are on the meta device: they are large."""
    dtype = getattr(torch, model.dtype)
    q_size = model.num_q_heads * model.head_dim
    qkv_size = q_size + 2 * model.num_kv_heads * model.head_dim
    features = model.intermediate_size

    def of(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def weight(in_features: int, out_features: int) -> PackedWeight:
        group = packed.group_size or in_features
        scales = of(in_features // group, out_features, dtype=torch.float32)
        zeros = None if packed.zero is not None else scales
        codes = of(out_features, in_features // 2, dtype=torch.uint8)
        span = span_of(in_features, group)
        return PackedWeight(codes, scales, zeros, packed.zero or 0.0, group, 4, span, None, None, None)

    def multiply(rows: int, in_features: int, out_features: int) -> None:
        packed_linear(of(rows, in_features), weight(in_features, out_features))

    def multiply_in_groups(rows: int, in_features: int, out_features: int) -> None:
        if (kernel := kernel_of_warp_groups()) is not None:
            kernel(of(rows, in_features), weight(in_features, out_features), WarpGroupsCut(rows, 1, whole=0))

    def multiply_row(in_features: int, out_features: int, *, gated: bool, added: bool) -> None:
        row_linear(
            of(1, in_features),
            weight(in_features, out_features),
            norm=None if added else RowNorm(of(in_features), 1e-6),
            gated=gated,
            residual=of(1, out_features) if added else None,
            pdl=pdl(),
        )

    attention = ((model.hidden_size, qkv_size, False, False), (q_size, model.hidden_size, False, True))
    feed_forward = ((model.hidden_size, 2 * features, True, False), (features, model.hidden_size, False, True))
    for in_features, out_features, gated, leaves in attention if model.experts else feed_forward + attention:
        sizes, added = (in_features, out_features), leaves and model.is_whole
        for rows in tile_rows_for_the_gpu(weight(*sizes)):
            yield lambda r=rows, s=sizes: multiply_in_groups(r, *s)
        if model.single_row:
            yield lambda s=sizes, g=gated, a=added: multiply_row(*s, gated=g, added=a)
        for rows in sorted({*ROWS, MOST_ROWS, MOST_TILED_ROWS}, reverse=True):
            yield lambda r=rows, s=sizes: multiply(r, *s)
        yield lambda s=sizes: widened(weight(*s), dtype)


def tile_rows_for_the_gpu(weight: PackedWeight) -> tuple[int, ...]:
    """Of groups of warps, for the GPU to compile for."""
    major, minor = warp_groups.HOPPER
    is_for_it = driver.active.get_current_target().arch == 10 * major + minor
    return warp_groups.ROWS if is_for_it and warp_groups_take(weight) else ()
