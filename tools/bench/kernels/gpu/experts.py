"""Expert layers in the shapes of known models, compared with the necessary bytes and products.

`expert_tiles` tries other tile shapes than those in use and prints the best by number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.kernels import triton
from quire.kernels.routing import Routing
from quire.kernels.triton.moe.expert_layers import StackedExperts, experts_in_tiles
from quire.kernels.triton.moe.grouped_linear import ProductCut, Tile, tile_for
from quire.kernels.triton.single_row.row_experts import TUNING, RowExpertsTile, row_experts
from quire.kernels.triton.single_row.row_linear import RowNorm
from tools.bench.kernels.gpu.timing import BF16_FLOP_PER_US, READ_BYTES_PER_US, Work, copies_beyond_cache, graph_us
from tools.bench.kernels.timing import BenchRow

TOKENS = (1, 4, 16, 64, 128, 256, 512, 2048, 8192)
FEW = [Tile.even(rows, 32, 128, 3, 4) for rows in (16, 32)] + [
    Tile.even(rows, columns, depth, stages, 4, copied=copied)
    for rows in (16, 32)
    for columns, depth in ((64, 64), (64, 128), (128, 64))
    for stages in (3, 4)
    for copied in (False, True)
]
MANY = [
    *(Tile.even(64, columns, 64, stages, 4) for columns in (64, 128) for stages in (3, 4)),
    Tile.even(128, 128, 64, 4, 8),
    *(
        Tile(rows, up, down, copied=True)
        for rows in (64, 128)
        for up in (ProductCut(64, 64, 3, 4), ProductCut(128, 64, 3, 8), ProductCut(128, 64, 4, 8))
        for down in (ProductCut(128, 64, 3, 4), ProductCut(256, 64, 4, 8))
    ),
]


@dataclass(frozen=True)
class ExpertLayer:
    """Expert layer of a model, with the number of experts per token."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * 2


LAYERS = {"30b-a3b": ExpertLayer(128, 8, 2048, 768), "mixtral 8x7b": ExpertLayer(8, 2, 4096, 14336)}


@dataclass(frozen=True)
class Case:
    """Tokens for a layer, and enough copies of the layer to exceed the cache."""

    layer: ExpertLayer
    x: torch.Tensor
    logits: torch.Tensor
    weights: list[StackedExperts]

    @classmethod
    def make(cls, layer: ExpertLayer, num_tokens: int) -> Case:
        """Creates a case with random weights, as many copies as exceed the L2 cache, up to 8."""

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, dtype=torch.bfloat16, device="cuda")

        hidden, size, count = layer.hidden_size, layer.intermediate_size, layer.num_experts
        read = layer.expert_bytes * min(count, num_tokens * layer.top_k)
        copies = min(copies_beyond_cache(read, most=8), 8)
        weights = [
            triton.prepare_experts(
                normal(count, 2 * size, hidden) * hidden**-0.5, normal(count, hidden, size) * size**-0.5
            )
            for _ in range(copies)
        ]
        return cls(layer, normal(num_tokens, hidden), normal(num_tokens, count), weights)

    @property
    def routing(self) -> Routing:
        return Routing(self.layer.top_k)

    def works(self, tile: Tile | None = None) -> list[Work]:
        """Returns routing and experts, once for each copy of the weights."""
        return [lambda w=w: self._run(w, tile) for w in self.weights]

    def _run(self, weight: StackedExperts, tile: Tile | None) -> None:
        """Routes the tokens and computes the experts, with the tile in use if `tile` is None."""
        ids, weights = triton.route(self.logits, self.routing)
        if tile is None:
            triton.experts(self.x, ids, weights, weight)
        else:
            experts_in_tiles(self.x, ids, weights, weight, None, None, None, tile=tile)

    def row_works(self, shape: RowExpertsTile) -> list[Work]:
        norm, residual = RowNorm(torch.ones_like(self.x[0]), 1e-6), self.x.clone()
        run = lambda w: row_experts(residual, norm, self.logits, self.routing, w, pdl=True, shape=shape)  # noqa: E731
        return [lambda w=w: run(w) for w in self.weights]

    @property
    def floors(self) -> dict[str, float]:
        """Returns the microseconds needed for the bytes of the selected experts' weights, and for the products."""
        chosen = triton.route(self.logits, self.routing)[0]
        read = self.layer.expert_bytes * len(chosen.unique())
        flop = chosen.numel() * self.layer.expert_bytes  # two per element of two bytes
        return {"bytes at 4.55 TB/s": read / READ_BYTES_PER_US, "products at 787 TFLOP/s": flop / BF16_FLOP_PER_US}


def bench() -> Iterator[BenchRow]:
    """Yields a row per layer and number of tokens, and one for a single row in the chain of two kernels."""
    for name, layer in LAYERS.items():
        for num_tokens in TOKENS:
            case = Case.make(layer, num_tokens)
            times = {"triton": graph_us(case.works())}
            yield row_of("experts", f"{name}, {num_tokens} tokens", case, times)
        case = Case.make(layer, 1)
        times = {"triton": graph_us(case.row_works(TUNING.here.tile))}
        yield row_of("experts", f"{name}, the chain's two kernels", case, times)


def tiles() -> Iterator[BenchRow]:
    """Returns, by number of tokens, the five best tiles and the one in use; for one row the shapes of the chain."""
    layer = LAYERS["30b-a3b"]
    for num_tokens in TOKENS[1:]:
        case = Case.make(layer, num_tokens)
        used = tile_for(num_tokens * layer.top_k, layer.num_experts, 2)
        times = {
            str(tile): graph_us(case.works(tile)) for tile in {*(MANY if num_tokens >= 512 else FEW), *MANY[:2], used}
        }
        best = dict(sorted(times.items(), key=lambda item: item[1])[:5])
        yield row_of("expert_tiles", f"{num_tokens} tokens", case, {**best, f"used {used}": times[str(used)]})
    case = Case.make(layer, 1)
    shapes = [RowExpertsTile(up, down) for up in (2, 4, 8) for down in (1, 2, 4)]
    times = {str(shape): graph_us(case.row_works(shape)) for shape in shapes}
    yield row_of("expert_tiles", "one row", case, dict(sorted(times.items(), key=lambda item: item[1])[:5]))


def row_of(section: str, name: str, case: Case, times: dict[str, float]) -> BenchRow:
    floors = case.floors
    rate = floors["bytes at 4.55 TB/s"] * READ_BYTES_PER_US / min(times.values()) / 1e3
    return BenchRow(section, name, {**times, **floors}, rate, "GB/s")
