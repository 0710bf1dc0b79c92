"""RMS norm of ranks' partial sums, reduced first if there is no fused kernel."""

from __future__ import annotations

import torch

from quire import kernels
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.layers.sharding import Shard
from tests.services.worker.sampling.rank_threads import RankThreads

NUM_RANKS = 3


def test_partial_sums_are_reduced_before_normalization() -> None:
    parts = torch.randn(NUM_RANKS, 5, 16)
    residual, weight = torch.randn(5, 16), torch.randn(16)
    ops = kernels.load("cpu")

    def normed(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        place = LayerPlacement(ops, torch.float32, torch.device("cpu"), shard=shard)
        norm, kept = RMSNorm("norm", 16, 1e-5, place, reduce_results=True), residual.clone()
        norm.weight.copy_(weight)
        return norm(parts[shard.rank].clone(), kept), kept

    total = residual + parts.sum(0)
    expected = torch.nn.functional.rms_norm(total, (16,), weight, 1e-5)
    for made, kept in RankThreads(NUM_RANKS).run(normed):
        torch.testing.assert_close(kept, total)
        torch.testing.assert_close(made, expected)
