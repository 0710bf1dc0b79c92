"""Warp-specialized products of packed_many_rows.py on a Hopper: two warp groups dequantize and multiply, a third loads.

A tile is 128 of a weight's rows, 64 per group, times ROWS tokens, which both groups read. While one half of a group's
step is being multiplied, its other half is dequantized into other registers, so the matrix units are always busy.
"""

from __future__ import annotations

import torch
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

from quire.kernels.triton.quantization import warp_groups
from quire.kernels.triton.quantization.packed_weight import PackedWeight, as_stored, how_codes_are_read
from quire.kernels.triton.quantization.tile_parts import (
    COLUMNS,
    GROUP_COLUMNS,
    add_part,
    edge,
    leave_part,
    number_of_parts,
    part_of,
    place_of,
    say_it_is_there,
)
from quire.kernels.triton.quantization.warp_groups import WarpGroupsCut

# Triton before 3.7 has other names for these.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
SPAN = gl.constexpr(warp_groups.SPAN)
CODE_SLOTS = 4
SLOT_ROWS = 4 * 256
BOX, FEW = gl.constexpr(128), gl.constexpr(32)  # tokens loaded at once
WIDTH = gl.constexpr(64)  # bytes of a span, and columns of each half
# Low or high nibbles of two bytes, minus a zero point, times a scale.
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
    """Dequantizes codes; not pure, so that it stays between the waits for products that read the same registers."""
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
def _scales(
    scales_ptr, zeros_ptr, step, column,
    OUT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OFFSET: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Returns scales, zero points and OFFSET of a step, [columns, 1]."""
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
def _fetch(
    x_tiles, x_few, code_tiles, x_ring, code_ring, x_full, x_empty, codes_full, codes_empty, tokens, whole,
    IN: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr, CODE_SLOTS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """Loading group: copies activations and codes of the program's steps into their rings."""
    ROUNDS: gl.constexpr = IN // SPAN // UNROLL
    row_tiles = (tokens + ROWS - 1) // ROWS
    shared = row_tiles * ((OUT + COLUMNS - 1) // COLUMNS) - whole
    slot, phase, code_slot, code_phase = 0, 1, 0, 1
    for index in range(number_of_parts(whole, shared, ROUNDS)):
        tile, begin, end = part_of(index, whole, shared, ROUNDS)
        row, column = place_of(tile, row_tiles, OUT, ROWS)
        # Partial tile: the copy engine would also fill the rows after the last token, which takes time.
        rows = gl.minimum((tokens - row + FEW - 1) // FEW * FEW, ROWS)
        for step in range(begin * UNROLL, end * UNROLL):
            mbarrier.wait(codes_empty.index(code_slot), code_phase)
            full = codes_full.index(code_slot)
            mbarrier.expect(full, COLUMNS * WIDTH)
            _copy_in(code_tiles, [column, step * (WIDTH // 2)], full, code_ring.index(code_slot))
            code_slot, code_phase = _next(code_slot, code_phase, CODE_SLOTS)
            for half in gl.static_range(2):
                mbarrier.wait(x_empty.index(slot), phase)
                full = x_full.index(slot)
                for some in gl.static_range(FEW, ROWS + 1, FEW):
                    mbarrier.expect(full, some * WIDTH * 2, pred=rows == some)
                at = step * SPAN + half * WIDTH
                for block in gl.static_range(0, ROWS, BOX):
                    if rows >= block + BOX:
                        _copy_in(x_tiles, [row + block, at], full, x_ring.index(slot).slice(block, BOX))
                    else:
                        for few in gl.static_range(block, block + BOX, FEW):
                            place = x_ring.index(slot).slice(few, FEW)
                            _copy_in(x_few, [row + few, at], full, place, pred=rows > few)
                slot, phase = _next(slot, phase, SLOTS)


@gluon.jit
def _multiply(
    out_tiles, parts_ptr, flags_ptr, scales_ptr, zeros_ptr, bias_ptr, stage, x_ring, code_ring,
    x_full, x_empty, codes_full, codes_empty, tokens, whole,
    PART: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    OFFSET: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, CODE_SLOTS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """Multiplies; PART: which 64 columns of a tile belong to this group."""
    DTYPE: gl.constexpr = x_ring.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # Positions in WEIGHT of the four elements of two bytes.
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
    ROUNDS: gl.constexpr = IN // SPAN // UNROLL
    SIZE: gl.constexpr = GROUP_COLUMNS * ROWS
    row_tiles = (tokens + ROWS - 1) // ROWS
    shared = row_tiles * ((OUT + COLUMNS - 1) // COLUMNS) - whole
    parts = number_of_parts(whole, shared, ROUNDS)
    mine = gl.program_id(0) * 2 + PART
    tile, begin, end = part_of(0, whole, shared, ROUNDS)
    row, column = place_of(tile, row_tiles, OUT, ROWS)
    inside = PART * GROUP_COLUMNS + gl.arange(0, GROUP_COLUMNS, gl.SliceLayout(1, PAIRS))
    scale, zero = _scales(scales_ptr, zeros_ptr, begin * UNROLL, column + inside, OUT, GROUP, ZERO, OFFSET, DTYPE)
    slot, phase, code_slot, code_phase = 0, 0, 0, 0
    mbarrier.wait(codes_full.index(code_slot), code_phase)
    codes = code_ring.index(code_slot).slice(PART * GROUP_COLUMNS, GROUP_COLUMNS).load(PAIRS)
    low = _widened(codes, zero, scale, False, WEIGHT, DTYPE)
    has_left = False
    for index in range(parts):
        goes_on = index + 1 < parts
        next_tile, next_begin, next_end = part_of(gl.where(goes_on, index + 1, index), whole, shared, ROUNDS)
        next_row, next_column = place_of(next_tile, row_tiles, OUT, ROWS)
        sums = gl.zeros([GROUP_COLUMNS, ROWS], gl.float32, SUMS)
        for round in range(begin, end):
            before = slot
            for step in gl.static_range(UNROLL):
                mbarrier.wait(x_full.index(slot), phase)
                sums = warpgroup_mma(low, x_ring.index(slot).permute((1, 0)), sums, is_async=True)
                # Not earlier: issued loads do not prevent the copy engine from overwriting their source.
                mbarrier.arrive(codes_empty.index(code_slot), count=1)
                code_slot, code_phase = _next(code_slot, code_phase, CODE_SLOTS)
                if step > 0:
                    sums = warpgroup_mma_wait(1, deps=[sums])
                    mbarrier.arrive(x_empty.index(before), count=1)
                before = slot
                slot, phase = _next(slot, phase, SLOTS)
                high = _widened(codes, zero, scale, True, WEIGHT, DTYPE)
                is_last = (round + 1 == end) & (step + 1 == UNROLL)
                following = gl.where(is_last, next_begin * UNROLL, round * UNROLL + step + 1)
                columns = gl.where(is_last, next_column, column) + inside
                scale, zero = _scales(scales_ptr, zeros_ptr, following, columns, OUT, GROUP, ZERO, OFFSET, DTYPE)
                mbarrier.wait(x_full.index(slot), phase)
                sums = warpgroup_mma(high, x_ring.index(slot).permute((1, 0)), sums, is_async=True)
                sums = warpgroup_mma_wait(1, deps=[sums])
                mbarrier.arrive(x_empty.index(before), count=1)
                before = slot
                slot, phase = _next(slot, phase, SLOTS)
                # After the last step of the last part there are none, and none are used.
                mbarrier.wait(codes_full.index(code_slot), code_phase, pred=goes_on | (is_last == 0))
                codes = code_ring.index(code_slot).slice(PART * GROUP_COLUMNS, GROUP_COLUMNS).load(PAIRS)
                low = _widened(codes, zero, scale, False, WEIGHT, DTYPE)
            # No product that reads registers may be in flight at the loop's start: ptxas would wait for each.
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(x_empty.index(before), count=1)

        if has_left:
            say_it_is_there(flags_ptr + mine)
        has_left = end < ROUNDS
        if has_left:
            leave_part(sums, parts_ptr + mine * SIZE, ROWS)
        else:
            # Programs wait only for earlier ones, which run concurrently and wait only after storing their parts.
            other = gl.program_id(0)
            while edge(other, shared, ROUNDS) > edge(gl.program_id(0), shared, ROUNDS) - begin:
                other -= 1
                its = other * 2 + PART
                sums = add_part(sums, parts_ptr + its * SIZE, flags_ptr + its, ROWS, SUMS)
            column += PART * GROUP_COLUMNS
            if bias_ptr is not None:
                columns = column + gl.arange(0, GROUP_COLUMNS, gl.SliceLayout(1, SUMS))
                bias = gl.load(bias_ptr + columns, mask=columns < OUT, other=0.0).to(gl.float32)
                sums += bias.expand_dims(1)
            tma.store_wait(0)
            stage.permute((1, 0)).store(sums.to(DTYPE))
            fence_async_shared()
            _copy_out(out_tiles, [row, column], stage)
        row, column, begin, end = next_row, next_column, next_begin, next_end
    if has_left:
        say_it_is_there(flags_ptr + mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "whole"])
def _packed_warp_groups(
    x_tiles,
    x_few,
    code_tiles,
    out_tiles,
    parts_ptr,
    flags_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    tokens,
    whole,
    IN: gl.constexpr,
    OUT: gl.constexpr,
    GROUP: gl.constexpr,
    ZERO: gl.constexpr,
    OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    CODE_SLOTS: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """Starts a program's three warp groups: one loads, two multiply."""
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [SLOTS, ROWS, WIDTH], x_tiles.layout)
    code_ring = gl.allocate_shared_memory(gl.int16, [CODE_SLOTS, COLUMNS, WIDTH // 2], code_tiles.layout)
    stage = gl.allocate_shared_memory(x_tiles.dtype, [2, ROWS, GROUP_COLUMNS], out_tiles.layout)
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
                    out_tiles, parts_ptr, flags_ptr, scales_ptr, zeros_ptr, bias_ptr, stage.index(0), x_ring, code_ring,
                    x_full, x_empty, codes_full, codes_empty, tokens, whole,
                    0, IN, OUT, GROUP, ZERO, OFFSET, ROWS, SLOTS, CODE_SLOTS, UNROLL,
                ),
            ),
            (
                _multiply,
                (
                    out_tiles, parts_ptr, flags_ptr, scales_ptr, zeros_ptr, bias_ptr, stage.index(1), x_ring, code_ring,
                    x_full, x_empty, codes_full, codes_empty, tokens, whole,
                    1, IN, OUT, GROUP, ZERO, OFFSET, ROWS, SLOTS, CODE_SLOTS, UNROLL,
                ),
            ),
            (
                _fetch,
                (
                    x_tiles, x_few, code_tiles, x_ring, code_ring,
                    x_full, x_empty, codes_full, codes_empty, tokens, whole,
                    IN, OUT, ROWS, SLOTS, CODE_SLOTS, UNROLL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def packed_warp_groups(x: torch.Tensor, weight: PackedWeight, cut: WarpGroupsCut | None = None) -> torch.Tensor:
    """Computes packed_linear for weights accepted by warp_groups_take().

    On the meta device nothing is computed, and a cut is required.
    """
    x = as_stored(x, weight).contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    cut = cut or warp_groups.best_cut(tokens, in_features, out_features, warp_groups.multiprocessors_of(x.device))
    out = x.new_empty((tokens, out_features))
    places = cut.programs if cut.whole < warp_groups.tiles_of(tokens, out_features, cut.rows) else 0
    parts = x.new_empty((places, 2, GROUP_COLUMNS.value * cut.rows), dtype=torch.float32)
    flags = x.new_empty((places, 2), dtype=torch.int64)
    how = how_codes_are_read(weight, x.dtype)
    halves = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pairs = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    _packed_warp_groups[(cut.programs,)](
        TensorDescriptor.from_tensor(x, [BOX.value, WIDTH.value], halves),
        TensorDescriptor.from_tensor(x, [FEW.value, WIDTH.value], halves),
        TensorDescriptor.from_tensor(weight.codes.view(torch.int16), [COLUMNS.value, WIDTH.value // 2], pairs),
        TensorDescriptor.from_tensor(out, [cut.rows, GROUP_COLUMNS.value], halves),
        parts,
        flags,
        weight.scales,
        weight.zeros,
        weight.bias,
        tokens,
        cut.whole,
        IN=in_features,
        OUT=out_features,
        GROUP=how["GROUP"],
        ZERO=how["ZERO"],
        OFFSET=how["OFFSET"],
        ROWS=cut.rows,
        SLOTS=SLOT_ROWS // cut.rows,  # what shared memory holds besides a tile's results
        CODE_SLOTS=CODE_SLOTS,
        UNROLL=warp_groups.unroll_of(in_features),
        num_warps=4,
    )
    return out
