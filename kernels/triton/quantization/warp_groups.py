"""Decides whether packed_warp_groups.py multiplies, and with which tiles.

It is written in Gluon for a Hopper's matrix instructions; elsewhere, and if Triton does not compile it,
packed_many_rows.py is used where it is faster.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from triton import cdiv

from quire.kernels.capability import SM80, SM90, SM100, ByCapability
from quire.kernels.triton.precompile.shapes import Calls, ModelShape
from quire.kernels.triton.quantization.packed_weight import PackedWeight, empty_weight, projections

Kernel = Callable[..., torch.Tensor]
log = logging.getLogger(__name__)

HAS_KERNEL = ByCapability({SM80: False, SM90: True, SM100: False})  # packed_warp_groups.py
SPAN = 128  # columns per step
COLUMNS = 128  # rows of the weight per tile
ALIGNED = 8  # of out_features: the copy engine writes rows aligned to 16 bytes
LEAST_ROWS, MOST_ROWS = 65, 8192  # tokens; fewer use packed_linear.py, more a dequantized copy (not measured)
# Rows of tiles processed together, column by column: their tokens stay in the L2 cache.
BAND = 4
ROWS = 128, 256  # tokens of a tile
LEAST_ROUNDS = 2  # minimum rounds of a program with a part of a tile
# Microseconds on an H200, by tokens of a tile: per step, and per tile in addition to its steps.
STEP_US, TILE_US = {256: 1.36, 128: 0.92}, {256: 2.0, 128: 3.0}
# Storing the parts of all programs, and adding one part. If they gain less than one
# part in 25, they lose: memory traffic also slows down a GPU under sustained load.
LEAVE_US, TAKE_US, LEAST_GAIN = 5.5, {256: 2.3, 128: 1.4}, 1.04

_failed: set[torch.device] = set()  # devices for which the kernel did not compile


@dataclass(frozen=True)
class WarpGroupsCut:
    """Partition of a product.

    The tiles after the first `whole` are divided evenly among the programs, although their number is no multiple of the
    programs: a program may start and end within a tile's sum.
    """

    rows: int  # tokens of a tile
    programs: int
    whole: int  # tiles computed by one program each


def unroll_of(in_features: int) -> int:
    """Returns the steps of a round, within which the matrix units are never fully drained."""
    return 2 if in_features % (2 * SPAN) == 0 else 1


def rounds_of(in_features: int) -> int:
    """Returns the rounds of a tile."""
    return in_features // SPAN // unroll_of(in_features)


def tiles_of(tokens: int, out_features: int, rows: int) -> int:
    return cdiv(tokens, rows) * cdiv(out_features, COLUMNS)


@functools.lru_cache(maxsize=8192)
def best_cut(tokens: int, in_features: int, out_features: int, multiprocessors: int) -> WarpGroupsCut:
    """Returns the cut with the least estimated time."""
    cuts = cuts_of(tokens, in_features, out_features, multiprocessors)
    return min(cuts, key=lambda cut: microseconds(cut, tokens, in_features, out_features))


def cuts_of(tokens: int, in_features: int, out_features: int, multiprocessors: int) -> Iterator[WarpGroupsCut]:
    """Yields the candidate cuts of a product: by rows per tile, whole tiles only, or with tiles shared by the
    programs."""
    for rows in ROWS:
        tiles = tiles_of(tokens, out_features, rows)
        yield WarpGroupsCut(rows, min(tiles, multiprocessors), whole=tiles)
        even = (tiles * splits for splits in range(2, multiprocessors // tiles + 1))
        for programs in sorted({multiprocessors, *even}):
            whole = max(tiles // programs - 1, 0) * programs
            if LEAST_ROUNDS * programs <= (tiles - whole) * rounds_of(in_features):
                yield WarpGroupsCut(rows, programs, whole)


def microseconds(cut: WarpGroupsCut, tokens: int, in_features: int, out_features: int) -> float:
    """Returns the estimated duration of a product with `cut`, from measured times of its rounds, tiles and
    exchanges."""
    tiles = tiles_of(tokens, out_features, cut.rows)
    a_tile = in_features // SPAN * STEP_US[cut.rows] + TILE_US[cut.rows]
    alone = cdiv(cut.whole, cut.programs) * a_tile
    shared = tiles - cut.whole
    if not shared:
        return alone
    # Other programs with parts of the tile that a program ends with.
    others = cdiv(cut.programs, shared) - (cut.programs % shared == 0)
    exchanged = LEAVE_US + others * TAKE_US[cut.rows]
    return LEAST_GAIN * (alone + shared / cut.programs * a_tile + exchanged)


def warp_groups_take(weight: PackedWeight) -> bool:
    """Returns whether the kernel supports the weight: 4 bits without a table, spans of SPAN columns, and a multiple of
    ALIGNED rows."""
    return weight.bits == 4 and weight.table is None and weight.span == SPAN and weight.codes.size(0) % ALIGNED == 0


def multiply_in_warp_groups(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor | None:
    """Computes packed_linear in warp groups; returns None if other kernels have to: other rows, weights or GPUs, or a
    failed compilation, which is logged and remembered for the device. Raises OutOfMemoryError."""
    if not LEAST_ROWS <= x.size(0) <= MOST_ROWS or not warp_groups_take(weight) or not is_hopper(x.device):
        return None
    kernel = None if x.device in _failed else kernel_of_warp_groups()
    if kernel is None:
        return None
    try:
        return kernel(x, weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise any exception
        _failed.add(x.device)
        log.warning("4-bit weights meet many rows in packed_many_rows on %s: %s", x.device, error)
        return None


@functools.cache
def kernel_of_warp_groups() -> Kernel | None:
    """Imports and returns packed_warp_groups; None, with a warning, if Triton's experimental Gluon is missing or has
    changed."""
    try:
        from quire.kernels.triton.quantization.packed_warp_groups import packed_warp_groups
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
    return HAS_KERNEL.of(torch.cuda.get_device_capability(index))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls for the model's packed weights; none on other GPUs or batch-invariantly."""
    if shape.packed is None or shape.batch_invariant or not HAS_KERNEL.here:
        return

    def multiply(rows: int, weight: PackedWeight) -> None:
        if (kernel := kernel_of_warp_groups()) is not None:
            kernel(shape.empty(rows, weight.in_features), weight, WarpGroupsCut(rows, 1, whole=0))

    for in_features, out_features, *_ in projections(shape):
        weight = empty_weight(shape, in_features, out_features)
        if warp_groups_take(weight):
            for rows in ROWS:
                yield partial(multiply, rows, weight)
