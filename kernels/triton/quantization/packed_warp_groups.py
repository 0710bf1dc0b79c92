"""packed_many_rows.py's products on a Hopper: two groups of warps widen and multiply, a third fetches.

A tile is 128 of a weight's rows, 64 to a group, times ROWS tokens, which both groups read. While a half of a group's
step is being multiplied, its other half is widened into other registers: the matrix units always have something to do.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.quantization import warp_groups
from kernels.triton.quantization.packed_weight import PackedWeight, as_stored, how_codes_are_read
from kernels.triton.quantization.split_sums import add_splits
from kernels.triton.quantization.warp_groups import WarpGroupsTile

# Triton before 3.7 has other names for these.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
GROUP_COLUMNS = gl.constexpr(64)  # of a weight's rows, a group's
COLUMNS = gl.constexpr(warp_groups.COLUMNS)
SPAN = gl.constexpr(warp_groups.SPAN)
CODE_SLOTS = 3
WIDTH = gl.constexpr(64)  # bytes of a span, and columns of either half of it
# Lower or upper halves of two bytes, less a zero, times a scale.
LOW_BFLOAT16 = gl.constexpr("""{
.reg .b32 pair, zero, scale, less, none;
cvt.u32.u16 pair, $2;
mov.b32 zero, {$3, $3};
mov.b32 scale, {$4, $4};
mov.b32 less, 0xBF80BF80;
mov.b32 none, 0x80008000;
prmt.b32 pair, pair, 0, 0x4140;
lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 pair, zero, less, pair;
fma.rn.bf16x2 pair, pair, scale, none;
mov.b32 {$0, $1}, pair;
}""")
HIGH_BFLOAT16 = gl.constexpr(LOW_BFLOAT16.value.replace("prmt", "shr.u32 pair, pair, 4;\nprmt"))
LOW_FLOAT16, HIGH_FLOAT16 = (
    gl.constexpr(text.value.replace("4300", "6400").replace("BF80", "BC00").replace("bf16x2", "f16x2"))
    for text in (LOW_BFLOAT16, HIGH_BFLOAT16)
)


@gluon.jit
def _widened(codes, zero, scale, HIGH: gl.constexpr, WEIGHT: gl.constexpr, DTYPE: gl.constexpr):
    """Not pure: it stays between the waits for the products that read the registers which it writes."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        even, odd = gl.inline_asm_elementwise(
            HIGH_BFLOAT16 if HIGH else LOW_BFLOAT16,
            "=h,=h,h,h,h",
            [codes, zero, scale],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=False,
            pack=1,
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            HIGH_FLOAT16 if HIGH else LOW_FLOAT16,
            "=h,=h,h,h,h",
            [codes, zero, scale],
            dtype=(gl.float16, gl.float16),
            is_pure=False,
            pack=1,
        )
    both = gl.join(even, odd).reshape([GROUP_COLUMNS, WIDTH])
    return gl.convert_layout(both, WEIGHT, assert_trivial=True)


@gluon.jit
def _codes_of(code_ring, codes_full, codes_empty, slot, phase, PART: gl.constexpr, LAYOUT: gl.constexpr, wanted=True):
    mbarrier.wait(codes_full.index(slot), phase, pred=wanted)
    codes = code_ring.index(slot).slice(PART * GROUP_COLUMNS, GROUP_COLUMNS).load(LAYOUT)
    mbarrier.arrive(codes_empty.index(slot), count=1, pred=wanted)
    return codes


@gluon.jit
def _scales(
    scales_ptr, zeros_ptr, step, column,
    OUT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OFFSET: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(scales, zeros and OFFSET) of a step, [columns, 1]"""
    place = step * SPAN // GROUP * OUT + column
    scale = gl.load(scales_ptr + place, mask=column < OUT, other=0.0).to(DTYPE)
    if zeros_ptr is None:
        zero = gl.full_like(scale, ZERO + OFFSET)
    else:
        zero = (gl.load(zeros_ptr + place, mask=column < OUT, other=0.0) + OFFSET).to(DTYPE)
    return scale.expand_dims(1), zero.expand_dims(1)


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _place(unit, row_tiles, IN: gl.constexpr, OUT: gl.constexpr, EACH: gl.constexpr):
    """(first token's tile, first column, split, first step, the step after the last) of a unit of work"""
    COLUMN_TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STEPS: gl.constexpr = IN // SPAN
    split = unit // (row_tiles * COLUMN_TILES)
    column = unit // row_tiles % COLUMN_TILES * COLUMNS
    return unit % row_tiles, column, split, split * EACH, gl.minimum(split * EACH + EACH, STEPS)


@gluon.jit
def _fetch(
    x_tiles, code_tiles, x_ring, code_ring, x_full, x_empty, codes_full, codes_empty, tokens,
    IN: gl.constexpr, OUT: gl.constexpr, SPLITS: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr, CODE_SLOTS: gl.constexpr,
):  # fmt: skip
    row_tiles = (tokens + ROWS - 1) // ROWS
    units = row_tiles * ((OUT + COLUMNS - 1) // COLUMNS) * SPLITS
    slot, phase, code_slot, code_phase = 0, 1, 0, 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column, _, begin, end = _place(unit, row_tiles, IN, OUT, EACH)
        for step in range(begin, end):
            mbarrier.wait(codes_empty.index(code_slot), code_phase)
            full = codes_full.index(code_slot)
            mbarrier.expect(full, COLUMNS * WIDTH)
            _copy_in(code_tiles, [column, step * (WIDTH // 2)], full, code_ring.index(code_slot))
            code_slot, code_phase = _next(code_slot, code_phase, CODE_SLOTS)
            for half in gl.static_range(2):
                mbarrier.wait(x_empty.index(slot), phase)
                full = x_full.index(slot)
                mbarrier.expect(full, ROWS * WIDTH * 2)
                at = step * SPAN + half * WIDTH
                _copy_in(x_tiles, [row_tile * ROWS, at], full, x_ring.index(slot))
                slot, phase = _next(slot, phase, SLOTS)


@gluon.jit
def _multiply(
    out_tiles, out_ptr, scales_ptr, zeros_ptr, bias_ptr, stage, x_ring, code_ring,
    x_full, x_empty, codes_full, codes_empty, tokens,
    PART: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    OFFSET: gl.constexpr, SPLITS: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr, CODE_SLOTS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """PART: which 64 columns of a tile are this group's."""
    DTYPE: gl.constexpr = x_ring.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # Two bytes each: where the four elements that they hold are in WEIGHT.
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
    row_tiles = (tokens + ROWS - 1) // ROWS
    units = row_tiles * ((OUT + COLUMNS - 1) // COLUMNS) * SPLITS
    slot, phase, code_slot, code_phase = 0, 0, 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row_tile, column, split, begin, end = _place(unit, row_tiles, IN, OUT, EACH)
        column += PART * GROUP_COLUMNS
        mine = column + gl.arange(0, GROUP_COLUMNS, gl.SliceLayout(1, PAIRS))
        sums = gl.zeros([GROUP_COLUMNS, ROWS], gl.float32, SUMS)
        scale, zero = _scales(scales_ptr, zeros_ptr, begin, mine, OUT, GROUP, ZERO, OFFSET, DTYPE)
        codes = _codes_of(code_ring, codes_full, codes_empty, code_slot, code_phase, PART, PAIRS)
        code_slot, code_phase = _next(code_slot, code_phase, CODE_SLOTS)
        low = _widened(codes, zero, scale, False, WEIGHT, DTYPE)
        for first in range(begin, end, UNROLL):
            before = slot
            for step in gl.static_range(UNROLL):
                mbarrier.wait(x_full.index(slot), phase)
                sums = warpgroup_mma(low, x_ring.index(slot).permute((1, 0)), sums, is_async=True)
                if step > 0:
                    sums = warpgroup_mma_wait(1, deps=[sums])
                    mbarrier.arrive(x_empty.index(before), count=1)
                before = slot
                slot, phase = _next(slot, phase, SLOTS)
                high = _widened(codes, zero, scale, True, WEIGHT, DTYPE)
                following = gl.minimum(first + step + 1, end - 1)
                scale, zero = _scales(scales_ptr, zeros_ptr, following, mine, OUT, GROUP, ZERO, OFFSET, DTYPE)
                mbarrier.wait(x_full.index(slot), phase)
                sums = warpgroup_mma(high, x_ring.index(slot).permute((1, 0)), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[sums])
                mbarrier.arrive(x_empty.index(before), count=1)
                before = slot
                slot, phase = _next(slot, phase, SLOTS)
                wanted = first + step + 1 < end
                codes = _codes_of(code_ring, codes_full, codes_empty, code_slot, code_phase, PART, PAIRS, wanted)
                if wanted:
                    code_slot, code_phase = _next(code_slot, code_phase, CODE_SLOTS)
                low = _widened(codes, zero, scale, False, WEIGHT, DTYPE)
            # No product that reads registers may be under way where the loop begins again: ptxas would wait for each.
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(x_empty.index(before), count=1)

        columns = column + gl.arange(0, GROUP_COLUMNS, gl.SliceLayout(1, SUMS))
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + columns, mask=columns < OUT, other=0.0).to(gl.float32)
            sums += bias.expand_dims(1)
        if SPLITS == 1:
            tma.store_wait(0)
            stage.permute((1, 0)).store(sums.to(DTYPE))
            fence_async_shared()
            _copy_out(out_tiles, [row_tile * ROWS, column], stage)
        else:
            row = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
            to = out_ptr + (split * tokens + row).to(gl.int64).expand_dims(0) * OUT + columns.expand_dims(1)
            gl.store(to, sums, mask=(columns < OUT).expand_dims(1) & (row < tokens).expand_dims(0))
    if SPLITS == 1:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def _packed_warp_groups(
    x_tiles,
    code_tiles,
    out_tiles,
    out_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    tokens,
    IN: gl.constexpr,
    OUT: gl.constexpr,
    GROUP: gl.constexpr,
    ZERO: gl.constexpr,
    OFFSET: gl.constexpr,
    SPLITS: gl.constexpr,
    EACH: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    CODE_SLOTS: gl.constexpr,
    UNROLL: gl.constexpr,
):
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [SLOTS, ROWS, WIDTH], x_tiles.layout)
    code_ring = gl.allocate_shared_memory(gl.int16, [CODE_SLOTS, COLUMNS, WIDTH // 2], code_tiles.layout)
    if SPLITS == 1:
        stage = gl.allocate_shared_memory(x_tiles.dtype, [2, ROWS, GROUP_COLUMNS], out_tiles.layout)
        first_stage, second_stage = stage.index(0), stage.index(1)
    else:
        first_stage, second_stage = code_ring, code_ring
    x_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    codes_full = gl.allocate_shared_memory(gl.int64, [CODE_SLOTS, 1], mbarrier.MBarrierLayout())
    codes_empty = gl.allocate_shared_memory(gl.int64, [CODE_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(x_full.index(slot), count=1)
        mbarrier.init(x_empty.index(slot), count=2)
    for slot in gl.static_range(CODE_SLOTS):
        mbarrier.init(codes_full.index(slot), count=1)
        mbarrier.init(codes_empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_tiles, out_ptr, scales_ptr, zeros_ptr, bias_ptr, first_stage, x_ring, code_ring,
                    x_full, x_empty, codes_full, codes_empty, tokens,
                    0, IN, OUT, GROUP, ZERO, OFFSET, SPLITS, EACH, ROWS, SLOTS, CODE_SLOTS, UNROLL,
                ),
            ),
            (
                _multiply,
                (
                    out_tiles, out_ptr, scales_ptr, zeros_ptr, bias_ptr, second_stage, x_ring, code_ring,
                    x_full, x_empty, codes_full, codes_empty, tokens,
                    1, IN, OUT, GROUP, ZERO, OFFSET, SPLITS, EACH, ROWS, SLOTS, CODE_SLOTS, UNROLL,
                ),
            ),
            (
                _fetch,
                (
                    x_tiles, code_tiles, x_ring, code_ring, x_full, x_empty, codes_full, codes_empty, tokens,
                    IN, OUT, SPLITS, EACH, ROWS, SLOTS, CODE_SLOTS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def packed_warp_groups(x: torch.Tensor, weight: PackedWeight, tile: WarpGroupsTile | None = None) -> torch.Tensor:
    """packed_linear of a weight that warp_groups_take. On no device nothing is computed, and a tile has to be given."""
    x = as_stored(x, weight).contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    multiprocessors = 1 if x.is_meta else warp_groups.multiprocessors_of(x.device)
    tile = tile or warp_groups.warp_groups_tile(tokens, in_features, out_features, multiprocessors)
    # A split without a step would wait for codes that never come.
    assert warp_groups.splits_are_whole(in_features, tile.splits), tile
    whole = tile.splits == 1
    out = x.new_empty((tokens, out_features))
    to = out if whole else x.new_empty((tile.splits, tokens, out_features), dtype=torch.float32)
    units = triton.cdiv(tokens, tile.rows) * triton.cdiv(out_features, COLUMNS.value) * tile.splits
    how = how_codes_are_read(weight, x.dtype)
    halves = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pairs = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    _packed_warp_groups[(min(units, multiprocessors),)](
        TensorDescriptor.from_tensor(x, [tile.rows, WIDTH.value], halves),
        TensorDescriptor.from_tensor(weight.codes.view(torch.int16), [COLUMNS.value, WIDTH.value // 2], pairs),
        TensorDescriptor.from_tensor(out, [tile.rows, GROUP_COLUMNS.value], halves),
        to,
        weight.scales,
        weight.zeros,
        weight.bias if whole else None,
        tokens,
        IN=in_features,
        OUT=out_features,
        GROUP=how["GROUP"],
        ZERO=how["ZERO"],
        OFFSET=how["OFFSET"],
        SPLITS=tile.splits,
        EACH=warp_groups.steps_of_a_split(in_features, tile.splits),
        ROWS=tile.rows,
        # What shared memory has room for beside a tile's results, if they go through it.
        SLOTS=(4 if whole else 6) * 256 // tile.rows,
        CODE_SLOTS=CODE_SLOTS,
        UNROLL=warp_groups.unroll_of(in_features),
        num_warps=4,
    )
    if not whole:
        add_splits(to, out, bias=weight.bias)
    return out
