"""Log-probabilities of logits with one program per row: torch's sums depend on a row's memory alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, floats


@dataclass(frozen=True)
class LogSoftmaxTuning:
    """Elements at a time and warps of a row."""

    block: int  # logits in registers at once
    warps: int


TUNING = ByCapability({SM90: LogSoftmaxTuning(block=4096, warps=8)})


@triton.jit
def _log_softmax(logits_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Computes the log-softmax of one row in blocks, in an order that does not depend on the batch."""
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(logits_ptr + row + start + at, mask=start + at < size, other=float("-inf"))
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(logits_ptr + row + start + at, mask=start + at < size, other=float("-inf"))
        sums += tl.exp(x - anchor)
    log = tl.log(tl.sum(sums, 0))
    for start in range(0, size, BLOCK):
        x = tl.load(logits_ptr + row + start + at, mask=start + at < size, other=float("-inf"))
        tl.store(out_ptr + row + start + at, (x - anchor) - log, mask=start + at < size)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities of logits [num_rows, size], same shape and dtype, with the same bits in any batch."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    num_rows, size = logits.shape
    if num_rows:
        _log_softmax[(num_rows,)](logits, out, size, BLOCK=TUNING.here.block, num_warps=TUNING.here.warps)
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    if shape.batch_invariant:
        yield lambda: log_softmax(floats(2, shape.vocab_size))
