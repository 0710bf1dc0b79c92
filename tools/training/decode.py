"""Greedy decoding of many prompts for evaluation: plain torch with a dense cache, independent of serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.training.network import Network, TrainingLayer, rotary

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer: [batch, kv_heads, positions, head_dim]."""

Cache = list[KeysValues]
"""Keys and values of every layer."""

STRIDE = 64
"""Decoding looks at so many positions more at a time."""


class Continuation(NamedTuple):
    """Text that follows a prompt, without the token that ended it.

    `lead` is the smallest distance, over all tokens including the last, between the best logit and the second best:
    an answer with a small one may differ where sums are rounded differently.
    """

    tokens: list[int]
    lead: float


class Replaced(NamedTuple):
    """Embeddings [number of occurrences, hidden] for the occurrences of a token, in the order of the prompts."""

    token: int
    embeddings: Tensor


class GreedyDecoder:
    """Continues batches of prompts with the likeliest tokens, computing in the dtype of the network's weights."""

    def __init__(self, network: Network, stop_tokens: Sequence[int]) -> None:
        self.network = network
        self._dtype = network.embedding.dtype
        self._device = network.embedding.device
        self._stop = torch.tensor(list(stop_tokens), device=self._device)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, replaced: Replaced | None = None
    ) -> list[Continuation]:
        """Returns greedy continuations of up to `max_tokens` tokens for all prompts in one batch, fewer where the
        context ends. `replaced`: embeddings in place of those of one token of the prompts."""
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        longest = int(lengths.max())
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=self._device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=self._device)
        limit = min(max_tokens, self.network.shape.max_position_embeddings - longest)
        cache = self.empty_cache(len(prompts), longest + limit)
        positions = torch.arange(longest, device=self._device).expand_as(tokens)
        hidden = self.forward(tokens, positions, cache, None, replaced)
        last = hidden[torch.arange(len(prompts), device=self._device), lengths - 1]
        return self._decode(last, lengths, longest, cache, limit)

    def _decode(self, last: Tensor, lengths: Tensor, prompts: int, cache: Cache, limit: int) -> list[Continuation]:
        """Decode until all have stopped. `lengths` [batch] are the next positions, `prompts` their maximum."""
        produced: list[Tensor] = []
        done = torch.zeros_like(lengths, dtype=torch.bool)
        leads = torch.full(lengths.shape, torch.inf, device=self._device)
        for step in range(limit):
            best = self.network.logits(last).topk(2)
            lead = (best.values[:, 0] - best.values[:, 1]).float()
            leads = torch.minimum(leads, lead.where(~done, torch.inf))
            token = best.indices[:, 0].where(~done, self._stop[0])
            produced.append(token)
            done |= torch.isin(token, self._stop)
            # Checking whether all have stopped synchronizes with the device, so it is done only now and then.
            if step == limit - 1 or (step % 8 == 7 and bool(done.all())):
                break
            # In strides, since some kernels are built anew for every length they meet.
            used = min(-(-(prompts + step + 1) // STRIDE) * STRIDE, prompts + limit)
            last = self.forward(token[:, None], (lengths + step)[:, None], cache, used)[:, 0]
        rows = torch.stack(produced, dim=1).tolist()
        return [Continuation(self._until_stop(row), lead) for row, lead in zip(rows, leads.tolist(), strict=True)]

    def _until_stop(self, tokens: list[int]) -> list[int]:
        stop = set(self._stop.tolist())
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        return tokens[:end]

    def empty_cache(self, batch: int, positions: int) -> Cache:
        """Returns zeroed keys and values per layer, each [batch, num_key_value_heads, positions, head_dim]."""
        shape = self.network.shape
        size = (batch, shape.num_key_value_heads, positions, shape.head_dim)
        zeros = (torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(2 * shape.num_hidden_layers))
        return list(zip(zeros, zeros, strict=True))

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: Cache, used: int | None, replaced: Replaced | None = None
    ) -> Tensor:
        """Hidden states of tokens [batch, length]: whole prompts when `used` is None, else one new token a sequence.

        `used` says how many positions of the cache may hold something.
        """
        x = self.network.embed(tokens, self._dtype)
        if replaced is not None:
            x = x.masked_scatter((tokens == replaced.token)[..., None], replaced.embeddings.to(x.dtype))
        rope = rotary(positions, self.network.shape, self._dtype)
        for layer, cached in zip(self.network.layers, cache, strict=True):
            assert isinstance(layer, TrainingLayer)
            q, k, v = (y.transpose(1, 2) for y in layer.before_attention(x, rope))
            new = (k, v)
            attended = _prefill(q, new, cached) if used is None else _decode_one(q, new, cached, positions, used)
            x = layer.after_attention(x, attended.transpose(1, 2).flatten(2))
        return x


def _prefill(q: Tensor, new: KeysValues, cached: KeysValues) -> Tensor:
    """Computes attention of whole prompts. Padding follows shorter prompts, where causal attention does not reach
    it."""
    (k, v), (keys, values) = new, cached
    keys[:, :, : k.shape[2]] = k
    values[:, :, : v.shape[2]] = v
    # Repeated here, since in float32 only the kernel that stores all scores would do it by itself.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in new)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _decode_one(q: Tensor, new: KeysValues, cached: KeysValues, positions: Tensor, used: int) -> Tensor:
    """Attention of one new token a sequence, each at its own position [batch, 1]."""
    (k, v), (keys, values) = new, cached
    rows = torch.arange(len(positions), device=positions.device)
    keys[rows, :, positions[:, 0]] = k[:, :, 0]
    values[rows, :, positions[:, 0]] = v[:, :, 0]
    mask = (torch.arange(used, device=positions.device) <= positions)[:, None, None]
    # The query heads that share a key head stand in the place of query positions: nothing has to be repeated.
    shared = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    attended = F.scaled_dot_product_attention(shared, keys[:, :, :used], values[:, :, :used], attn_mask=mask)
    return attended.flatten(1, 2).unsqueeze(2)
