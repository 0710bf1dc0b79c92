"""Whether packed_warp_groups.py multiplies, and how its products are cut up.

It is written in Gluon for a Hopper's matrix instructions; elsewhere, and where Triton does not compile it,
packed_many_rows.py multiplies as many rows as pay there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton import cdiv

from kernels.triton.quantization.packed_weight import PackedWeight

Kernel = Callable[..., torch.Tensor]
log = logging.getLogger(__name__)

HOPPER = (9, 0)
SPAN = 128  # columns of a step
COLUMNS = 128  # of a weight's rows, a tile's
ALIGNED = 8  # out_features: the copy engine writes rows that begin at 16 bytes
LEAST_ROWS, MOST_ROWS = 65, 8192  # of tokens: fewer are packed_linear.py's; more a widened copy's, not measured
MOST_SPLITS = 4
# Microseconds on an H100, by tokens of a tile: of a step, and of a tile beside its steps.
STEP_US, TILE_US = {256: 1.36, 128: 0.92}, 2.0
FINEST = min(STEP_US)
ADD_US, ADD_US_PER_BYTE = 4.0, 0.6e-6  # of sums in parts, which are written, read and added up

_failed: set[torch.device] = set()  # for which the kernel did not compile


@dataclass(frozen=True)
class WarpGroupsTile:
    """How a product is cut up."""

    rows: int  # tokens of a tile
    splits: int  # of the sum


def unroll_of(in_features: int) -> int:
    """Steps between which the matrix units are never waited for to the last."""
    return 2 if in_features % (2 * SPAN) == 0 else 1


def steps_of_a_split(in_features: int, splits: int) -> int:
    """The last may have fewer."""
    unroll = unroll_of(in_features)
    return cdiv(in_features // SPAN // unroll, splits) * unroll


def splits_are_whole(in_features: int, splits: int) -> bool:
    """Whether each has a step."""
    return (splits - 1) * steps_of_a_split(in_features, splits) < in_features // SPAN


@functools.lru_cache(maxsize=8192)
def warp_groups_tile(tokens: int, in_features: int, out_features: int, multiprocessors: int) -> WarpGroupsTile:
    """The one that takes least by STEP_US and the others."""
    ways = (
        WarpGroupsTile(rows, splits)
        for rows in STEP_US
        for splits in range(1, MOST_SPLITS + 1)
        if splits_are_whole(in_features, splits)
    )
    return min(ways, key=lambda tile: _microseconds(tile, tokens, in_features, out_features, multiprocessors))


def _microseconds(
    tile: WarpGroupsTile, tokens: int, in_features: int, out_features: int, multiprocessors: int
) -> float:
    units = cdiv(tokens, tile.rows) * cdiv(out_features, COLUMNS) * tile.splits
    a_unit = steps_of_a_split(in_features, tile.splits) * STEP_US[tile.rows] + TILE_US
    written = 4 * tile.splits * cdiv(tokens, FINEST) * FINEST * out_features
    adding = ADD_US + ADD_US_PER_BYTE * written if tile.splits > 1 else 0.0
    return cdiv(units, multiprocessors) * a_unit + adding


def tiles_of(in_features: int, out_features: int, multiprocessors: int) -> list[WarpGroupsTile]:
    """Of all numbers of tokens."""
    counts = range(cdiv(LEAST_ROWS, FINEST) * FINEST, MOST_ROWS + 1, FINEST)
    return [*dict.fromkeys(warp_groups_tile(count, in_features, out_features, multiprocessors) for count in counts)]


def warp_groups_take(weight: PackedWeight) -> bool:
    return weight.bits == 4 and weight.table is None and weight.span == SPAN and weight.codes.size(0) % ALIGNED == 0


def multiply_in_warp_groups(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor | None:
    """packed_linear, or None: other kernels have to do it."""
    if not LEAST_ROWS <= x.size(0) <= MOST_ROWS or not warp_groups_take(weight) or not is_hopper(x.device):
        return None
    kernel = None if x.device in _failed else kernel_of_warp_groups()
    if kernel is None:
        return None
    try:
        return kernel(x, weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        _failed.add(x.device)
        log.warning("4-bit weights meet many rows in packed_many_rows on %s: %s", x.device, error)
        return None


@functools.cache
def kernel_of_warp_groups() -> Kernel | None:
    """packed_warp_groups, or None where Triton's Gluon, which is an experiment, is not there or not as it is known."""
    try:
        from kernels.triton.quantization.packed_warp_groups import packed_warp_groups
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("4-bit weights meet many rows in packed_many_rows: this Triton's Gluon is another: %s", error)
        return None
    return packed_warp_groups


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _is_hopper(device.index)


def multiprocessors_of(device: torch.device) -> int:
    return _multiprocessors(device.index)


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == HOPPER


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
