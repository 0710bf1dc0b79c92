"""Recurrent states in pages, and expected outputs computed token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.state_pages import StatePages, StateShape

BLOCK_SIZE = 16
SHAPE = StateShape(num_channels=2 * 2 * 16 + 6 * 32, conv_width=4, num_heads=6, key_dim=16, value_dim=32)
NUM_BLOCKS = 64


@dataclass
class Sequence:
    """All inputs of a layer for one sequence, from its first token on."""

    x: Tensor  # [length, num_channels]
    strength: Tensor  # [length, num_heads]
    step: Tensor
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    wanted: Tensor | None = None  # computed on demand


class Layer:
    """One layer's weights and pages. Pages are initialized with NaN to detect uninitialized reads."""

    def __init__(
        self,
        ops: Any,
        shape: StateShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        *,
        delta: bool = True,
    ) -> None:
        """Creates the layer; `delta`: gated delta rule, else a state space."""
        self.ops, self.shape, self.dtype, self.delta = ops, shape, dtype, delta
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._random = torch.Generator().manual_seed(seed)
        self.weight = self._draw(shape.num_channels, shape.conv_width, scale=0.5)
        self.rate = -self._draw(shape.num_heads).float().abs() - 0.05
        self.bias = self._draw(shape.num_heads).float()
        self.conv_bias = None if delta else self._draw(shape.num_channels)
        words = shape.part_words + 8
        parts = [torch.full((NUM_BLOCKS, words), float("nan"), device=self.device) for _ in range(2)]
        self.pages = StatePages(parts[0], parts[1], shape)
        self._next = 1

    def _draw(self, *size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=self._random) * scale).to(self.device, self.dtype)

    def sequence(self, length: int, *, alike: bool = False) -> Sequence:
        """Creates a sequence; `alike`: nearly equal keys, so that every token corrects the previous one."""
        x = self._draw(length, self.shape.num_channels)
        if alike:
            x = (x[:1] + 0.01 * x).to(self.dtype)
        heads = self.shape.num_heads
        blocks = -(-length // BLOCK_SIZE)
        table = list(range(self._next, self._next + blocks))
        self._next += blocks
        return Sequence(x, self._draw(length, heads) + (3 if alike else 0), self._draw(length, heads), table)

    def compute(self, rows: list[tuple[Sequence, int]], *, decode: bool = False) -> list[Tensor]:
        """Computes the given number of further tokens of each sequence; returns their outputs."""
        spans = [slice(row.num_computed, row.num_computed + count) for row, count in rows]
        x, strength, step = (
            torch.cat([getattr(row, name)[span] for (row, _), span in zip(rows, spans, strict=True)])
            for name in ("x", "strength", "step")
        )
        width = max(len(row.table) for row, _ in rows) + 1
        tables = torch.tensor([row.table + [0] * (width - len(row.table)) for row, _ in rows], dtype=torch.int32)
        starts = torch.tensor([0, *(count for _, count in rows)]).cumsum(0).int()
        lens = torch.tensor([span.stop if count else 0 for span, (_, count) in zip(spans, rows, strict=True)]).int()
        tables, starts, lens = (part.to(self.device) for part in (tables, starts, lens))
        where = (self.pages, tables, None if decode else starts, lens, BLOCK_SIZE)
        wide = torch.cat((x, x[:, :4]), dim=1)  # rows of the projection are longer than the part read
        qkv = self.ops.short_convolution(wide[:, : x.size(1)], self.weight, *where, self.conv_bias)
        if self.delta:
            out = self.ops.gated_delta_rule(qkv, strength, step, self.rate, self.bias, *where)
        else:
            out = self.ops.state_space_scan(qkv, step, self.rate, self.bias, *where)
        for row, count in rows:
            row.num_computed += count
        return list(out.split([count for _, count in rows]))

    def expected(self, row: Sequence) -> Tensor:
        """Returns expected outputs, float64 [length, num_heads, value_dim]."""
        shape = self.shape
        x, weight = row.x.double(), self.weight.double()
        padded = functional.pad(x, (0, 0, shape.conv_width - 1, 0))
        mixed = sum(padded[i : i + len(x)] * weight[:, i] for i in range(shape.conv_width))
        mixed = mixed if self.conv_bias is None else mixed + self.conv_bias.double()
        mixed = functional.silu(mixed).to(self.dtype).double()  # rounded as between kernels
        values = shape.num_heads * shape.value_dim
        keys = (shape.num_channels - values) // 2
        q, k, v = mixed.split((keys, keys, values), dim=1)
        repeats = shape.num_heads * shape.key_dim // keys
        q, k = (part.unflatten(1, (-1, shape.key_dim)).repeat_interleave(repeats, 1) for part in (q, k))
        if self.delta:
            q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
            q = q * shape.key_dim**-0.5
        v = v.unflatten(1, (shape.num_heads, shape.value_dim))
        step = functional.softplus(row.step.double() + self.bias.double())
        decay = (self.rate.double() * step).exp()
        share = row.strength.double().sigmoid() if self.delta else step
        state, out = torch.zeros(shape.num_heads, shape.key_dim, shape.value_dim).to(v), []
        for i in range(len(x)):
            state = state * decay[i, :, None, None]
            missing = v[i] - torch.einsum("hk,hkv->hv", k[i], state) if self.delta else v[i]
            state = state + torch.einsum("hk,hv->hkv", k[i], missing * share[i, :, None])
            out.append(torch.einsum("hk,hkv->hv", q[i], state))
        return torch.stack(out)

    def error(self, row: Sequence, begin: int, found: Tensor) -> float:
        """Returns the largest error; relative for a state space, whose outputs may be large."""
        if row.wanted is None:
            row.wanted = self.expected(row)
        largest = 1.0 if self.delta else max(1.0, float(row.wanted.abs().max()))
        return float((found.double() - row.wanted[begin : begin + len(found)]).abs().max()) / largest


def run_of_everything(layer: Layer) -> float:
    """Runs whole and chunked prompts, rows without tokens, decodes in mixed and pure steps, and a sequence that
    continues after another's full block. Returns the largest error."""
    first, second, third = layer.sequence(75), layer.sequence(40), layer.sequence(20, alike=True)
    idle, worst = layer.sequence(1), 0.0

    def step(rows: list[tuple[Sequence, int]], *, decode: bool = False) -> None:
        nonlocal worst
        begins = [row.num_computed for row, _ in rows]
        for (row, count), begin, found in zip(rows, begins, layer.compute(rows, decode=decode), strict=True):
            worst = max(worst, layer.error(row, begin, found)) if count else worst

    step([(first, 67), (third, 3)])
    step([(second, 5), (idle, 0), (third, 1), (first, 1)])
    step([(first, 1), (third, 1)], decode=True)
    step([(second, 30), (first, 1), (third, 15)])
    for _ in range(5):
        step([(first, 1), (second, 1)], decode=True)
    fourth = layer.sequence(50)
    fourth.x[:32], fourth.strength[:32], fourth.step[:32] = first.x[:32], first.strength[:32], first.step[:32]
    fourth.table[:2], fourth.num_computed = [0, first.table[1]], 32
    step([(fourth, 17), (second, 0)])
    step([(fourth, 1)], decode=True)
    return worst
