"""Context parallel steps (layers/context.py): each rank computes a part of a long step's tokens.

Every rank ends with the hidden states of all tokens that the heads read, so the heads run as on a single rank. Rank 0's
samples are then broadcast: sums may round differently on other ranks, and a rank that was fed another token would cache
the keys and values of another text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.services.worker.step.token_shares import TokenShares, share_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.services.worker.graphs.recordings import Recordings
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.context import Context, Peers
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.lora.no_adapters import StepAdapters
    from quire.services.worker.runner.step_batches import StepBatches
    from quire.services.worker.sampling.sampler import SampledTokens
    from quire.services.worker.step.slot_memory import SlotMemory
    from quire.services.worker.step.slots import NewBlocks
    from quire.services.worker.step.step_inputs import StepInputs
    from quire.shared.columns import I32

    Forward = Callable[[ForwardBatch, list[LayerCache]], Tensor]

WORD_BYTES = 8  # unit in which cache rows are copied if their size divides by it


@dataclass(frozen=True, slots=True)
class PageExchange:
    """Exchange of one KV group's keys and values, independent of their dtype."""

    peers: Peers
    own: Tensor  # int64 [most] cache positions stored by this rank, padded with the null block
    all_ranks: Tensor  # int64 [size, most] cache positions stored by all ranks

    def __call__(self, *caches: Tensor) -> None:
        """Gathers a layer's stored tokens into caches [num_blocks, block_size, num_kv_heads, head_dim]."""
        rows = [_words(cache) for cache in caches]
        sent = rows[0].new_empty((len(rows), len(self.own), rows[0].size(1)))
        for part, place in zip(rows, sent, strict=True):
            torch.index_select(part, 0, self.own, out=place)
        gathered = self.peers.all_gather(sent)
        for number, part in enumerate(rows):
            part[self.all_ranks] = gathered[:, number]


def _words(cache: Tensor) -> Tensor:
    """Returns a view of the cache as [num_positions, words per position], int64 or, for odd sizes, uint8."""
    row = cache[0, 0].nbytes
    return cache.view(cache.size(0) * cache.size(1), -1).view(torch.int64 if row % WORD_BYTES == 0 else torch.uint8)


class ContextParallel:
    """Partitions long steps over the context-parallel ranks and gathers the hidden states from all of them."""

    def __init__(self, context: Context, adapters: StepAdapters) -> None:
        self._context, self._adapters = context, adapters

    def shares(self, inputs: StepInputs, recordings: Recordings) -> TokenShares | None:
        """Partitions the step; returns None if each rank computes the step by itself.

        Steps small enough for a CUDA graph are bound by launching; up to twice their size a step would have to be
        launched anyway and exchanges would come on top, so it is not partitioned.
        """
        most_recorded = recordings.chunks.most_tokens
        return share_out(inputs, self._context.size) if inputs.num_tokens > 2 * most_recorded else None

    def hidden(
        self,
        forward: Forward,
        shares: TokenShares,
        batches: StepBatches,
        new_blocks: NewBlocks,
        *,
        tokens: I32,
        only_samples: bool,
    ) -> Tensor:
        """Computes this rank's share of the step and returns the hidden states [num_wanted, hidden_width] of `tokens`,
        gathered from all ranks in the order of `tokens`.

        Uploads the share's inputs and its adapter rows; afterwards restores the adapter rows of the whole step, which
        the heads read. `only_samples`: `tokens` are the sampled tokens, so the last layer may skip all others.
        """
        wanted = shares.wanted(tokens)
        own = shares.share_of(self._context.rank, wanted)
        self._adapters.write_rows(own)
        up = batches.upload(own, new_blocks)
        batch = batches.batch(own, up, up.sampling_tokens, only_last=only_samples)
        hidden = forward(self._with_exchanges(batch, shares, batches), batches.caches)
        gathered = self._context.peers.all_gather(hidden.contiguous()).flatten(0, 1)
        (order,) = batches.staging.upload([wanted.order])
        self._adapters.write_rows(shares.inputs)
        return gathered.index_select(0, order)

    def agree(self, sampled: SampledTokens, memory: SlotMemory) -> None:
        """Overwrites the sampled tokens and every slot's last token with rank 0's, on all ranks.

        Called after every step that samples, partitioned or not.
        """
        self._context.peers.broadcast(sampled.token_ids)
        self._context.peers.broadcast(memory.last_tokens)

    def _with_exchanges(self, batch: ForwardBatch, shares: TokenShares, batches: StepBatches) -> ForwardBatch:
        """Returns `batch` with one PageExchange for each KV group; uploads the slot mappings of all ranks."""
        num_groups = 1 + len(batch.other_groups)
        (flat,) = batches.staging.upload([shares.slot_mappings(num_groups).ravel()])
        mappings = flat.long().view(num_groups, shares.size, shares.most)
        rank, peers = self._context.rank, self._context.peers
        return batch.with_exchanges(
            [PageExchange(peers, mapping[rank], mapping) for mapping in mappings],
            of_last=batches.caches[-1].group if batches.caches else 0,
        )
