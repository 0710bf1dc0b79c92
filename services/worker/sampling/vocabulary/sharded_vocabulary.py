"""Vocabulary of a rank that holds a shard of the tokens; ranks exchange a number, a token or a few candidates a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import Ops
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.sampling.ranking import largest_by_id
from quire.services.worker.sampling.vocabulary.columns import ChoiceColumns
from quire.services.worker.sampling.vocabulary.filter_thresholds import FilterThresholds, kth_of_best
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard

BANNED = float("-inf")


class ShardedVocabulary:
    """Vocabulary of which this rank holds a shard: computes its share of every answer and combines the ranks' shares by
    collectives, identically on all of them. Methods that take `logits` see this shard's columns only."""

    def __init__(self, shard: Shard, vocab_size: int, ops: Ops) -> None:
        self.shard = VocabShard.for_rank(shard, vocab_size)
        self.accepts_16_bit = ops.sources["best_of_part"] == "quire.kernels.triton"
        self._best_of_part, self._best_of_parts = ops.best_of_part, ops.best_of_parts
        self._log_softmax = ops.log_softmax
        self._ranks = shard.collectives
        self._thresholds = FilterThresholds(ops.digit_sums, self.all_reduce_sum)

    def sample(self, logits: Tensor, columns: ChoiceColumns, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draws with noise by token id: every rank finds its best candidate, and the best of all ranks wins, int32
        [num_rows]; filters are applied first to a copy."""
        temperature = columns.temperature
        if temperature is not None and columns.have_filters:
            logits = self.filtered(logits, columns)
            temperature = (temperature > 0).float()  # filtered() has divided by it
        best = self._best_of_part(logits, temperature, seeds, positions, self.shard.first)
        return self._best_of_parts(self._ranks.all_gather(best))

    def filtered(self, logits: Tensor, columns: ChoiceColumns) -> Tensor:
        """Returns float32 logits divided by temperature, with the filters applied over all ranks' tokens: first the
        threshold below the most likely, then top_k, then top_p; the last two exchange candidates where few tokens
        remain, and search a threshold otherwise."""
        temperature, values = columns.temperature, logits.float()
        if temperature is not None:
            values = values / temperature.masked_fill(temperature == 0, 1).unsqueeze(1)
        if not columns.have_filters:
            return values
        tops = self.all_reduce_max(values.amax(dim=1, keepdim=True))
        least = columns.min_p_threshold(tops)
        if least is not None:
            values = _mask_below(values, least)
        if columns.top_k is not None and columns.max_kept:
            return self._filter_few(values, tops, columns, columns.top_k)
        if columns.top_k is not None:
            values = _mask_below(values, self._thresholds.kth_largest(values, columns.top_k))
        if columns.top_p is not None:
            values = _mask_below(values, self._thresholds.nucleus(values, tops, columns.top_p))
        return values

    def _filter_few(self, values: Tensor, tops: Tensor, columns: ChoiceColumns, top_k: Tensor) -> Tensor:
        """Applies top_k and top_p to rows of which each keeps `columns.max_kept` tokens at most, by gathering that many
        best values of each rank."""
        count = min(columns.max_kept, self.shard.size)
        parts = self._ranks.all_gather(values.topk(count, dim=1).values)
        best = parts.transpose(0, 1).flatten(1).sort(dim=1, descending=True).values[:, : columns.max_kept]
        floors = kth_of_best(best, top_k)
        values = _mask_below(values, floors)
        if columns.top_p is None:
            return values
        return _mask_below(
            values, self._thresholds.nucleus_of_best(_mask_below(best, floors), values, tops, columns.top_p)
        )

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self.sample(logits, ChoiceColumns(torch.ones_like(logits[:, 0])), seeds, positions).clamp_(min=0).long()

    def softmax(self, logits: Tensor) -> Tensor:
        return self.log_softmax(logits).exp_()

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Runs the kernel on this shard alone, then corrects by the weight of the other ranks' shards."""
        values: Tensor = self._log_softmax(logits)
        tops, best = logits.amax(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
        is_banned = tops == BANNED  # every token of this shard
        weight = (tops - best).masked_fill(is_banned, BANNED)  # logarithm of the sum of exponentials
        total, *others = self._ranks.all_gather(weight).unbind(0)
        for other in others:  # in the order of ranks, so that all ranks round alike
            total = torch.logaddexp(total, other)
        return (values + (weight - total)).masked_fill_(is_banned, BANNED)

    def most_likely(self, values: Tensor, count: int, *, by_id: bool) -> Tensor:
        """Gathers the `count` best tokens of each rank, fewer if its shard is smaller, and selects the best of those,
        int64 [num_rows, count]."""
        values = values[:, : self.shard.count]
        num_local, num_sent = min(count, self.shard.count), min(count, self.shard.size)
        places = largest_by_id(values, num_local) if by_id else values.topk(num_local, dim=1).indices
        best = functional.pad(values.gather(1, places), (0, num_sent - num_local), value=BANNED)
        token_ids = functional.pad(places.int() + self.shard.first, (0, num_sent - num_local))
        gathered = self._ranks.all_gather(torch.stack((best.view(torch.int32), token_ids), dim=2))
        candidates, token_ids = gathered.transpose(0, 1).flatten(1, 2).unbind(2)
        order = candidates.contiguous().view(torch.float32).sort(dim=1, descending=True, stable=True).indices
        return token_ids.gather(1, order[:, :count]).long()

    def gather(self, values: Tensor, token_ids: Tensor) -> Tensor:
        """Returns the values of `token_ids` from whichever rank holds each, by an all-reduce of maxima; -inf for an id
        of no rank."""
        token_columns, is_local = self.shard.local_columns(token_ids)
        return self.all_reduce_max(values.gather(1, token_columns).masked_fill_(~is_local, BANNED))

    def count_at_least(self, values: Tensor, least: Tensor) -> Tensor:
        counts = (values[:, : self.shard.count] >= least).sum(dim=1).int()
        return self.all_reduce_sum(counts)

    def all_reduce_max(self, of_part: Tensor) -> Tensor:
        return self._ranks.all_gather(of_part).amax(dim=0)

    def all_reduce_sum(self, of_part: Tensor) -> Tensor:
        return self._ranks.all_reduce(of_part)

    def all_gather(self, logits: Tensor) -> Tensor:
        return self._ranks.all_gather_columns(logits)[:, : self.shard.vocab_size].contiguous()

    def local_logits(self, whole: Tensor) -> Tensor:
        """Cuts this rank's columns out of `whole` [num_rows, vocab_size] and pads them to shard.size with -inf."""
        shard = self.shard
        local = whole[:, shard.first : shard.first + shard.count]
        return functional.pad(local, (0, shard.size - shard.count), value=BANNED)


def _mask_below(values: Tensor, floors: Tensor) -> Tensor:
    """Returns a copy of `values` [num_rows, n] with -inf where they are below the row's floor; `floors`: [num_rows]."""
    return values.masked_fill(values < floors.unsqueeze(1), BANNED)
