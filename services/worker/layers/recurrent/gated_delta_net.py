"""Gated DeltaNet layer: a short convolution, the gated delta rule, an output gate (arXiv 2412.06464).

Its state of fixed size is kept in the pages that hold other layers' keys and values (kernels/state_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.kernels.state_pages import StatePages
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.recurrent.layer import RecurrentConfig, RecurrentLayer
from quire.services.worker.layers.recurrent.parameters import Convolution, HeadRates
from quire.services.worker.layers.recurrent.recurrence import Recurrence, Rows, Tensors
from quire.services.worker.layers.sharding import HeadShare, head_features

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig


class GatedDeltaNet(RecurrentLayer):
    """Gated DeltaNet of Qwen3-Next; this rank has a part of the heads.

    Input projections are grouped by key head, with the values that read it, until finish() reorders them.
    """

    def __init__(self, name: str, config: DecoderConfig, place: LayerPlacement) -> None:
        whole = config.recurrent
        assert whole is not None, "its family reads them"
        hidden, heads, total = config.hidden_size, whole.heads_of(place.shard), whole.num_heads
        self._sizes = whole.of_rank(place.shard)
        self._ops, self._place, self._shape = place.ops, place, self._sizes.state
        mixed, gates = _inputs(name, whole, heads)
        self._mixed, self._gates = Linear([mixed], hidden, False, place), Linear([gates], hidden, False, place)
        channels = _channels(whole, heads), whole.state.num_channels
        self._convolution = Convolution(f"{name}.conv1d", *channels, whole.conv_width, place)
        self._recurrence = Recurrence()
        self._rate = HeadRates(f"{name}.A_log", heads.queries, total, place)
        self._step_bias = HeadRates(f"{name}.dt_bias", heads.queries, total, place)
        self._norm = RMSNorm(f"{name}.norm", whole.value_dim, config.rms_norm_eps, place)
        (columns,) = head_features(heads.queries, whole.value_dim)
        output = Linear([Projection(f"{name}.out_proj", hidden)], whole.values, False, place, columns=columns)
        own = (self._mixed, self._gates, self._convolution, self._rate, self._step_bias, self._norm)
        super().__init__(output, (*own, output))

    def finish(self) -> None:
        """Reorders and packs the loaded weights, and replaces A_log by the decay rates -exp(A_log)."""
        self._reorder()
        super().finish()
        self._rate.values.exp_().neg_()

    def _reorder(self) -> None:
        """Permutes the input projections from groups by key head to all queries, keys, values, gates; and to all
        strengths, then step sizes."""
        sizes, device = self._sizes, self._place.device
        values = sizes.values // sizes.num_key_heads
        self._mixed.reorder(_side_by_side((sizes.key_dim, sizes.key_dim, values, values), sizes.num_key_heads, device))
        each = sizes.num_heads // sizes.num_key_heads
        self._gates.reorder(_side_by_side((each, each), sizes.num_key_heads, device))

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Runs projections, convolution and gated delta rule, updating the states in the cache's pages.

        Returns the gated, normalized outputs, [num_tokens, num_heads * value_dim].
        """
        sizes, ops, pages = self._sizes, self._ops, StatePages(cache.k, cache.v, self._shape)
        mixed = self._mixed(x)

        def change(given: Tensors, rows: Rows) -> Tensors:
            """Updates states by convolution and delta rule; `given`: convolution inputs and gates of the rows'
            tokens."""
            where = (pages, *rows, cache.block_size)
            strength, step = given[1].chunk(2, dim=1)
            qkv = ops.short_convolution(given[0], self._convolution.weight, *where)
            return (ops.gated_delta_rule(qkv, strength, step, self._rate.values, self._step_bias.values, *where),)

        (outputs,) = self._recurrence.run((mixed[:, : self._shape.num_channels], self._gates(x)), batch, change)
        return ops.gated_norm(outputs, mixed[:, mixed.size(1) - sizes.values :], self._norm.weight, self._norm.eps)


def _inputs(name: str, whole: RecurrentConfig, heads: HeadShare) -> tuple[Projection, Projection]:
    """Returns both input projections, in_proj_qkvz and in_proj_ba, with this rank's rows."""
    mixed = tuple(_rank_features(whole, heads, 2 * whole.key_dim, (whole.value_dim, whole.value_dim)))
    gates = tuple(_rank_features(whole, heads, 0, (1, 1)))
    return (
        Projection(f"{name}.in_proj_qkvz", 2 * whole.keys + 2 * whole.values, taken=mixed),
        Projection(f"{name}.in_proj_ba", 2 * whole.num_heads, taken=gates),
    )


def _rank_features(
    whole: RecurrentConfig, heads: HeadShare, of_key: int, of_values: tuple[int, ...]
) -> Iterator[range]:
    """Yields this rank's features in groups of one key head (`of_key` features) and its value heads (`of_values`
    each)."""
    repeats, own = whole.num_heads // whole.num_key_heads, heads.num_q // heads.num_kv
    for place, key in enumerate(heads.keys):
        start = key * (of_key + repeats * sum(of_values))
        first = heads.queries[place * own] - key * repeats
        if of_key:
            yield range(start, start + of_key)
        start += of_key
        for size in of_values:
            yield range(start + first * size, start + (first + own) * size)
            start += repeats * size


def _channels(whole: RecurrentConfig, heads: HeadShare) -> tuple[range, ...]:
    """Returns this rank's convolution channels, as ranges of the model's: queries, keys, values."""
    queries, keys = (head_features(heads.keys, whole.key_dim, first) for first in (0, whole.keys))
    return (*queries, *keys, *head_features(heads.queries, whole.value_dim, 2 * whole.keys))


def _side_by_side(sizes: tuple[int, ...], num_groups: int, device: torch.device) -> Tensor:
    """Returns the permutation from groups, each with parts of these `sizes`, to all first parts, then all second ones,
    and so on."""
    import torch

    features = torch.arange(num_groups * sum(sizes), device=device).view(num_groups, -1)
    return torch.cat([part.flatten() for part in features.split(sizes, dim=1)])
