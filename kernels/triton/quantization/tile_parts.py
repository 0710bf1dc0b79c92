"""Assignment of tiles and parts of tiles to programs of packed_warp_groups.py, and the exchange of parts (split-K).

The first tiles are whole ones, assigned in turn. The others are shared: all their rounds, tile after tile, are cut into
as many equal pieces as there are programs. The last program of a tile adds the partial sums stored by earlier ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.quantization import warp_groups

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the latter before Triton 3.7
GROUP_COLUMNS = gl.constexpr(64)  # rows of the weight per group
COLUMNS = gl.constexpr(warp_groups.COLUMNS)
BAND = gl.constexpr(warp_groups.BAND)
# Flags of stored and taken parts. New memory equals the first by chance once in 2**64 times.
IS_THERE, IS_TAKEN = gl.constexpr(0x5A1D7C3E92B4F086), gl.constexpr(-0x5A1D7C3E92B4F086)


@gluon.jit
def edge(program, shared, ROUNDS: gl.constexpr):
    """Returns the first round of a program's part of the shared tiles, counted from the first shared tile."""
    return program * (shared * ROUNDS) // gl.num_programs(0)


@gluon.jit
def _whole_ones(whole):
    """Returns the number of whole tiles of this program."""
    return (whole - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def number_of_parts(whole, shared, ROUNDS: gl.constexpr):
    first = edge(gl.program_id(0), shared, ROUNDS)
    last = edge(gl.program_id(0) + 1, shared, ROUNDS)
    return _whole_ones(whole) + gl.where(first < last, (last - 1) // ROUNDS - first // ROUNDS + 1, 0)


@gluon.jit
def part_of(index, whole, shared, ROUNDS: gl.constexpr):
    """Returns tile, first round and end round of one of a program's parts.

    The last shared tile comes first: parts that others wait for are stored before they wait.
    """
    first = edge(gl.program_id(0), shared, ROUNDS)
    last = edge(gl.program_id(0) + 1, shared, ROUNDS)
    own = _whole_ones(whole)
    tile = gl.where(first < last, (last - 1) // ROUNDS, 0) - (index - own)
    begin, end = gl.maximum(first - tile * ROUNDS, 0), gl.minimum(last - tile * ROUNDS, ROUNDS)
    if index < own:
        tile, begin, end = gl.program_id(0) + index * gl.num_programs(0), 0, ROUNDS
    else:
        tile += whole
    return tile, begin, end


@gluon.jit
def place_of(tile, row_tiles, OUT: gl.constexpr, ROWS: gl.constexpr):
    """Returns the first token and the first column of a tile."""
    COLUMN_TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    band = tile // (BAND * COLUMN_TILES) * BAND
    inside = tile % (BAND * COLUMN_TILES)
    rows = gl.minimum(row_tiles - band, BAND)
    return (band + inside % rows) * ROWS, inside // rows * COLUMNS


@gluon.jit
def _flat(sums, ROWS: gl.constexpr):
    """Flattens [GROUP_COLUMNS, ROWS]: contiguous by thread, then by warp, then over warps."""
    by_thread = sums.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return by_thread.reshape([GROUP_COLUMNS * ROWS])


@gluon.jit
def leave_part(sums, part_ptr, ROWS: gl.constexpr):
    """Stores a partial sum in `part_ptr`."""
    flat = _flat(sums, ROWS)
    gl.store(part_ptr + gl.arange(0, GROUP_COLUMNS * ROWS, flat.type.layout), flat)


@gluon.jit
def say_it_is_there(flag):
    """Sets the flag of the part that this group has stored."""
    _barrier()
    gl.atomic_xchg(flag, IS_THERE, sem="release", scope="gpu")


@gluon.jit
def add_part(sums, part_ptr, flag, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Waits for a part and adds it, in halves, because registers cannot hold all of it."""
    HALF: gl.constexpr = GROUP_COLUMNS * ROWS // 2
    seen = gl.atomic_cas(flag, IS_THERE, IS_TAKEN, sem="acquire", scope="gpu")
    while seen != IS_THERE:
        seen = gl.atomic_cas(flag, IS_THERE, IS_TAKEN, sem="acquire", scope="gpu")
    _barrier()
    low, high = gl.split(_flat(sums, ROWS).reshape([2, HALF]).permute((1, 0)))
    at = part_ptr + gl.arange(0, HALF, low.type.layout)
    low += gl.load(at, cache_modifier=".cg")
    high += gl.load(at + HALF, cache_modifier=".cg")
    by_thread = gl.join(low, high).permute((1, 0)).reshape([ROWS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(by_thread.reshape([GROUP_COLUMNS, ROWS]), SUMS, assert_trivial=True)
