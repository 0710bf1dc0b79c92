"""What a rank sends in a layer of a mixture, whose experts all are as likely, in either way; nothing is computed.

Sums over all ranks are a reduce-scatter and a gather, each of which sends all rows but a rank's own part.

python -m tests.services.worker.ranks.bench_dispatch [--tokens 8192] [--hidden-size 2048] [--experts 128] [--top-k 8]"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from quire.services.worker.layers.feed_forward.dispatch import needed_by, route_counts
from quire.services.worker.layers.feed_forward.expert_placement import ExpertPlacement
from quire.services.worker.layers.sharding import Shard

RANKS = (2, 4, 8, 16, 32, 64)
ELEMENT_BYTES = 2
CHOICE_BYTES = 4 + 4  # an id and a weight
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes sent, averaged over ranks."""

    of_all_ranks: float  # a reduce-scatter or a gather of all rows
    choices: float
    crossing: float  # rows to the ranks of their experts; as much comes back

    @property
    def summed(self) -> float:
        """Bytes of the sums after attention and after experts."""
        return 4 * self.of_all_ranks

    @property
    def dispatched(self) -> float:
        return 2 * self.of_all_ranks + self.choices + 2 * self.crossing


def sent(ids: torch.Tensor, num_experts: int, size: int, hidden_size: int) -> Sent:
    """Bytes sent for ids [num_tokens, top_k]."""
    (num_tokens, top_k), row = ids.shape, hidden_size * ELEMENT_BYTES
    places = ExpertPlacement(num_experts, Shard(size=size, whole_experts=True), ids.device)
    counts = route_counts(needed_by(places.ranks_of(ids), size))
    to_others = int((counts.sum() - counts.trace()).item())
    each = num_tokens * (size - 1) / size
    return Sent(each * row, each * top_k * CHOICE_BYTES, to_others / size * row)


def main(num_tokens: int, hidden_size: int, num_experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.int()
    print("| ranks | `allreduce` | `alltoall` | of that: sums and gathers | choices | rows there and back | ratio |")
    print("|---|---|---|---|---|---|---|")
    for size in RANKS:
        found = sent(ids, num_experts, size, hidden_size)
        parts = (found.summed, found.dispatched, 2 * found.of_all_ranks, found.choices, 2 * found.crossing)
        cells = " | ".join(f"{part / MIB:.1f}" for part in parts)
        print(f"| {size} | {cells} | {found.dispatched / found.summed:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    given = parser.parse_args()
    main(given.tokens, given.hidden_size, given.experts, given.top_k)
