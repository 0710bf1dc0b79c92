"""The rejection rule of speculative sampling (arXiv 2211.17192, algorithm 1): an alternative to coupled choice.

A draft x, proposed with probability q(x), is kept with probability min(1, p(x) / q(x)); else the token is drawn from
what p has more than q. Tokens then follow p exactly. The draws are functions of (seed, position), as all others, each
of a stream of its own; but which of them a token depends on depends on where drafts began.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.sampling.noise import gumbel_noise
from quire.services.worker.sampling.vocabulary.port import Vocabulary

# Added to the seed: what is drawn for different purposes at one position must be independent.
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
    """int64 [num_rows]: each row's draft if it is kept, else another token.

    target: float32 [num_rows, shard.size], logarithms of what p is proportional to, of the vocabulary's shard
    proposed: the same of q; None: each draft was certain
    drafts: int64 [num_rows]
    seeds: int64 [num_rows]; positions: int32 [num_rows]
    """
    p, drafted = vocabulary.softmax(target), drafts.unsqueeze(1)
    if proposed is None:
        places, here = vocabulary.shard.local_columns(drafted)
        q = torch.zeros_like(p).scatter_(1, places, here.float())
    else:
        q = vocabulary.softmax(proposed)
    chances = [vocabulary.gather(probability, drafted).squeeze(1) for probability in (p, q)]
    kept = uniform(seeds + KEEP, positions) * chances[1] <= chances[0]
    others = vocabulary.draw((p - q).clamp_(min=0).log_(), seeds + REST, positions)
    return drafts.where(kept, others)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """float32 [num_rows], in (0, 1)."""
    noise = gumbel_noise(seeds, positions, 1).squeeze(1)
    return -torch.expm1(-torch.exp(-noise))
