"""Sampling of one token per row."""

from __future__ import annotations

import torch

from quire.kernels.reference.sampling.noise import gumbel_noise

# Values with which the temperature (rows are greedy) and each filter, in the order of sample(), have no effect.
UNUSED = ((0.0, torch.float32), (0, torch.int32), (1.0, torch.float32), (0.0, torch.float32))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Samples one token per row, int32 [num_rows]. Rows are independent of each other.

    logits: float32 [num_rows, vocab_size], may be overwritten; -inf bans a token
    temperature: float32 [num_rows], 0: greedy, the lowest id among the most likely; None: all rows are greedy
    top_k: int32 [num_rows], keep the k most likely, equals of the k-th stay; 0 or less: all; None: all, everywhere
    top_p: float32 [num_rows], then keep the most likely whose probabilities add up to top_p, at least one, equals of
        the last stay; 1: all; None: all, everywhere
    min_p: float32 [num_rows], before both drop what is less likely than min_p times the most likely; None: nothing
    seeds: int64 [num_rows]; positions: int32 [num_rows], the index of the token to be sampled in its sequence
    Filters look at probabilities after the division by temperature. What remains is sampled as
    argmax(logit / temperature + noise(seed, position, id)) (Gumbel-max); the noise is defined in noise.py.

    -1 for a row without a choice: it contains a NaN or +inf, or only -inf.
    """
    choice = logits.argmax(dim=1)
    lost = ~torch.isfinite(logits.gather(1, choice.unsqueeze(1)).squeeze(1))  # argmax treats NaN as the largest
    if temperature is not None:
        noisy = filtered(logits, temperature, top_k, top_p, min_p) + gumbel_noise(seeds, positions, logits.size(1))
        choice = torch.where(temperature == 0, choice, noisy.argmax(dim=1))
    return choice.masked_fill(lost, -1).int()


def filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the logits that `sample` draws from, float32 [num_rows, vocab_size]; arguments as there.

    Logits are divided by temperature (except in greedy rows) and -inf for tokens dropped by a filter.
    """
    if temperature is not None:
        logits = logits / temperature.masked_fill(temperature == 0, 1).unsqueeze(1)
    if min_p is not None:
        cutoff = logits.amax(dim=1) + min_p.log()
        logits = _drop_below(logits, cutoff)
    if top_k is None and top_p is None:
        return logits
    ordered = logits.sort(dim=1, descending=True).values
    if top_k is not None:
        cutoff = _value_at(ordered, torch.where(top_k > 0, top_k, logits.size(1)))
        logits, ordered = _drop_below(logits, cutoff), _drop_below(ordered, cutoff)
    if top_p is not None:
        probabilities = ordered.softmax(dim=1)
        before = probabilities.cumsum(dim=1) - probabilities  # sum over more likely tokens
        wanted = torch.where(top_p < 1, (before < top_p.unsqueeze(1)).sum(dim=1), logits.size(1))
        logits = _drop_below(logits, _value_at(ordered, wanted))
    return logits


def _value_at(ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns the count-th value of each row, [num_rows]."""
    last = count.clamp(min=1, max=ordered.size(1)).long() - 1
    return ordered.gather(1, last.unsqueeze(1)).squeeze(1)


def _drop_below(logits: torch.Tensor, cutoff: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < cutoff.unsqueeze(1), float("-inf"))
