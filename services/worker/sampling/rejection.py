"""Rejection rule of speculative sampling (arXiv 2211.17192, algorithm 1), an alternative to coupled choice.

A draft x, proposed with probability q(x), is accepted with probability min(1, p(x) / q(x)); otherwise the token is
drawn from the normalised positive part of p - q. Tokens then follow p exactly. The draws are functions of (seed,
position) like all others, each of its own stream; which of them decides a token depends on where drafts began.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.sampling.noise import gumbel_noise
from quire.services.worker.sampling.vocabulary.port import Vocabulary

# Added to the seed: draws for different purposes at one position must be independent.
KEEP, REST, DRAFT = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x1405_7B7E_F767_814F


def accept_or_resample(
    target: Tensor,
    proposed: Tensor | None,
    drafts: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    vocabulary: Vocabulary,
) -> Tensor:
    """Returns each row's draft if it is accepted, else another token: int64 [num_rows].

    target: float32 [num_rows, shard.size], unnormalised log-probabilities of p
    proposed: the same of q; None: each draft was certain
    drafts: int64 [num_rows]
    seeds: int64 [num_rows]; positions: int32 [num_rows]
    """
    p, drafted = vocabulary.softmax(target), drafts.unsqueeze(1)
    if proposed is None:
        columns, is_local = vocabulary.shard.local_columns(drafted)
        q = torch.zeros_like(p).scatter_(1, columns, is_local.float())
    else:
        q = vocabulary.softmax(proposed)
    probabilities = [vocabulary.gather(probability, drafted).squeeze(1) for probability in (p, q)]
    accepted = uniform(seeds + KEEP, positions) * probabilities[1] <= probabilities[0]
    others = vocabulary.draw((p - q).clamp_(min=0).log_(), seeds + REST, positions)
    return drafts.where(accepted, others)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns uniform random numbers in (0, 1), float32 [num_rows], each a function of its row's seed and position."""
    noise = gumbel_noise(seeds, positions, 1).squeeze(1)
    return -torch.expm1(-torch.exp(-noise))
