"""Sampling from a vocabulary that is divided over ranks: the best of each part's best tokens is sampled.

A token's noise depends only on seed, position and id, so the parts together sample what the whole would.
"""

from __future__ import annotations

import torch

from quire.kernels.reference.sampling.noise import noise_of, row_keys


def best_of_part(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Returns the best token of each row's part, int32 [num_rows, 3]: score bits, token id, bits of the largest logit.

    The score is float32; the largest logit is +inf if there is a NaN.

    logits: [num_rows, part_size], float32 or, on CUDA, 16 bits wide; -inf bans a token
    first: token id of the first column
    Other arguments and scores: `sample`. Among equal scores the lowest id is chosen.
    """
    scores = logits = logits.float()
    tops = logits.amax(dim=1)
    tops = tops.masked_fill(tops.isnan(), float("inf"))
    if temperature is not None:
        is_greedy = temperature == 0
        noise = noise_of(*row_keys(seeds, positions), torch.arange(first, first + logits.size(1), device=logits.device))
        noisy = logits / temperature.masked_fill(is_greedy, 1).unsqueeze(1) + noise
        scores = logits.where(is_greedy.unsqueeze(1), noisy)
    best, places = scores.max(dim=1)
    return torch.stack((best.view(torch.int32), places.int() + first, tops.view(torch.int32)), dim=1)


def best_of_parts(found: torch.Tensor) -> torch.Tensor:
    """Returns the tokens, int32 [num_rows], from best_of_part() of each part, int32 [num_parts, num_rows, 3], in id
    order.

    -1 for a row without a choice: it contains a NaN or +inf, or only -inf.
    """
    scores, token_ids, tops = found.unbind(2)
    best = scores.contiguous().view(torch.float32).argmax(dim=0)
    lost = ~tops.contiguous().view(torch.float32).amax(dim=0).isfinite()
    return token_ids.gather(0, best.unsqueeze(0)).squeeze(0).masked_fill(lost, -1)
