"""A complete decode step of the tiny shape from a tape, with eight adapters in the batch and with none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.kernels import cpu
from quire.kernels.cpu.tape import Tape
from quire.kernels.reference.low_rank import AdaptedRows, LowRankAddition
from tools.bench.kernels.cpu.step import LENGTH, MOST, Decoder, Inputs
from tools.bench.kernels.timing import BenchRow, medians

NUM_ADAPTERS, BATCH = 8, 8
PLACES = {"attention": (0, 1), "all layers": (0, 1, 2, 3)}  # which of a layer's four products have adapters
RANKS = (8, 16)
SMALL = 1e-4  # scale that avoids overflow


def bench() -> Iterator[BenchRow]:
    for places in PLACES:
        for rank in RANKS:
            yield one(places, rank)


def one(places: str, rank: int) -> BenchRow:
    """Measures a recorded decode step of 8 sequences with LoRA adapters of `rank` on the weights of `places`, and
    without."""
    package = AdaptedPackage()
    decoder, tape, inputs = Decoder(package, torch.bfloat16), Tape(num_tokens=MOST + 1, num_seqs=MOST), Inputs(65, MOST)
    package.add_to([layer[place] for layer in decoder.layers for place in PLACES[places]], rank)
    with tape.recording():
        decoder(inputs)

    def step(num_adapted: int) -> None:
        package.rows.count.fill_(num_adapted)
        tape.replay(num_tokens=BATCH, num_seqs=BATCH)

    times = medians({"8 adapters": lambda: step(BATCH), "none": lambda: step(0)}, seconds=2)
    case = f"tiny bfloat16 decode {BATCH} x {LENGTH}, rank {rank}, {places}"
    return BenchRow("adapters", case, times, BATCH / times["8 adapters"] * 1e6, "tok/s")


class AdaptedPackage:
    """quire.kernels.cpu, with adapters in some linear layers."""

    def __init__(self) -> None:
        self.rows = AdaptedRows.none(MOST + 1, NUM_ADAPTERS)
        self.rows.tokens[:BATCH] = torch.arange(BATCH)
        self.rows.numbers[:BATCH] = torch.arange(BATCH) * NUM_ADAPTERS // BATCH
        self._low_ranks: dict[int, Any] = {}  # by address of the layer's weight

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def add_to(self, weights: list[Any], rank: int) -> None:
        """Prepares NUM_ADAPTERS random LoRA pairs of `rank` for each of the packed weights."""
        for weight in weights:
            sizes = weight.in_features, weight.out_features
            pairs = [(torch.randn(rank, sizes[0]), torch.randn(sizes[1], rank) * SMALL) for _ in range(NUM_ADAPTERS)]
            updates = [LowRankAddition([(down.bfloat16(), up.bfloat16())]) for down, up in pairs]
            self._low_ranks[weight.pointer] = cpu.prepare_low_rank(updates, sizes[0], sizes[1:], torch.bfloat16)

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Computes the linear layer and adds the low-rank updates of the rows' adapters in place."""
        result = cpu.linear(x, weight)
        if weight.pointer in self._low_ranks:
            cpu.add_low_rank(x, result, self._low_ranks[weight.pointer], self.rows)
        return result
