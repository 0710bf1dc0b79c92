"""Which tiles, and which parts of tiles, a program of packed_warp_groups.py has, and how parts change hands.

The first tiles are whole ones, dealt out in turn. The others are shared: all their rounds, tile after tile, are cut
into as many equal pieces as there are programs. Who has a tile's last rounds adds what programs before it have left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.quantization import warp_groups

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton before 3.7 has the latter
GROUP_COLUMNS = gl.constexpr(64)  # of a weight's rows, a group's
COLUMNS = gl.constexpr(warp_groups.COLUMNS)
BAND = gl.constexpr(warp_groups.BAND)
# That a part is there, and that it was taken. New memory holds the first by chance once in 2**64 times.
IS_THERE, IS_TAKEN = gl.constexpr(0x5A1D7C3E92B4F086), gl.constexpr(-0x5A1D7C3E92B4F086)


@gluon.jit
def edge(program, shared, ROUNDS: gl.constexpr):
    """The first round of a program's part of the shared tiles, whose rounds are counted from the first tile's first."""
    return program * (shared * ROUNDS) // gl.num_programs(0)


@gluon.jit
def _whole_ones(whole):
    """How many of the tiles that no other program has a part of are this one's."""
    return (whole - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def number_of_parts(whole, shared, ROUNDS: gl.constexpr):
    first = edge(gl.program_id(0), shared, ROUNDS)
    last = edge(gl.program_id(0) + 1, shared, ROUNDS)
    return _whole_ones(whole) + gl.where(first < last, (last - 1) // ROUNDS - first // ROUNDS + 1, 0)


@gluon.jit
def part_of(index, whole, shared, ROUNDS: gl.constexpr):
    """(tile, first round, the round after the last) of one of a program's parts

    Of shared tiles the last comes first: what others wait for is there before they do.
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
    """(first token, first column) of a tile"""
    COLUMN_TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    band = tile // (BAND * COLUMN_TILES) * BAND
    inside = tile % (BAND * COLUMN_TILES)
    rows = gl.minimum(row_tiles - band, BAND)
    return (band + inside % rows) * ROWS, inside // rows * COLUMNS


@gluon.jit
def _flat(sums, ROWS: gl.constexpr):
    """[GROUP_COLUMNS, ROWS] -> [all]: what is side by side in a thread, then the threads of a warp, then warps"""
    by_thread = sums.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return by_thread.reshape([GROUP_COLUMNS * ROWS])


@gluon.jit
def leave_part(sums, part_ptr, ROWS: gl.constexpr):
    flat = _flat(sums, ROWS)
    gl.store(part_ptr + gl.arange(0, GROUP_COLUMNS * ROWS, flat.type.layout), flat)


@gluon.jit
def say_it_is_there(flag):
    """Of the part that this group has left."""
    _barrier()
    gl.atomic_xchg(flag, IS_THERE, sem="release", scope="gpu")


@gluon.jit
def add_part(sums, part_ptr, flag, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Waits for it. In halves: registers have no room for all."""
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
