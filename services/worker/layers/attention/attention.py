"""The attention layer: projections around an attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.sharding import HeadShare, head_features, portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable
    from quire.services.worker.models.config.decoder_config import DecoderConfig
    from quire.services.worker.models.single_row import RowKernels


class Sinks:
    """Attention sinks of this rank's heads: a score per head that takes part in the softmax without a value."""

    def __init__(self, name: str, num_q_heads: int, place: LayerPlacement) -> None:
        self._name, self._total = name, num_q_heads
        self._heads = place.shard.part(num_q_heads, "num_attention_heads")
        self._given: Tensor = place.empty(len(self._heads))
        self.scores: Tensor = self._given  # float32, once loaded

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield self._name, portion(self._given, 0, (self._heads,), self._total)

    def finish(self) -> None:
        """Converts the loaded scores to float32."""
        self.scores = self._given.float()


class Attention:
    """Grouped-query attention with rotary positions and optional norms per head, sinks, soft cap and sliding window."""

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        window: int,
        backend: AttentionBackend,
        place: LayerPlacement,
        *,
        reduce_results: bool = True,
    ) -> None:
        """Builds this rank's heads without weights.

        `name`: of the module in the checkpoint; `window`: positions visible to a token, 0: all. `reduce_results`:
        all-reduces the output, else it stays a partial sum.
        """
        head_dim, q_size = config.head_dim, config.num_q_heads * config.head_dim
        kv_size = config.num_kv_heads * head_dim
        self._heads = place.shard.heads(config.num_q_heads, config.num_kv_heads)
        inputs = _select_heads(self.inputs(name, q_size, kv_size, config), self._heads, config)
        self.qkv = Linear(inputs, config.hidden_size, config.attention.qkv_bias, place)
        (columns,) = head_features(self._heads.queries, head_dim)
        outputs = [self.outputs(name, config)]
        self.output = Linear(
            outputs, q_size, config.attention.o_bias, place, columns=columns, reduce_results=reduce_results
        )
        norms = [f"{name}.q_norm", f"{name}.k_norm"] if config.attention.qk_norm else []
        offset = config.scales.norm_offset
        self._norms = [RMSNorm(norm, head_dim, config.rms_norm_eps, place, offset=offset) for norm in norms]
        self._scale, self._softcap = config.attention.scale or head_dim**-0.5, config.attention.softcap
        self._sinks = Sinks(f"{name}.sinks", config.num_q_heads, place) if config.attention.has_sinks else None
        self._parts: tuple[Loadable, ...] = (
            self.qkv,
            self.output,
            *self._norms,
            *([self._sinks] if self._sinks else []),
        )
        self._config, self._window, self._backend, self._ops = config, window, backend, place.ops
        self._place = place

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        """Returns the projections of queries, keys and values, in this order, as named in the checkpoint: three, or one
        fused.

        Families override it for other names or layouts.
        """
        if config.attention.fused_qkv:
            return [Projection(f"{name}.qkv_proj", q_size + 2 * kv_size)]
        return [
            Projection(f"{name}.q_proj", q_size),
            Projection(f"{name}.k_proj", kv_size),
            Projection(f"{name}.v_proj", kv_size),
        ]

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.o_proj", config.hidden_size)

    @property
    def q_shape(self) -> tuple[int, int]:
        """Heads and head size of this rank's queries."""
        return self._heads.num_q, self._config.head_dim

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        """Reorders rotated pairs, folds in the residual scale and packs the loaded weights."""
        self._reorder()
        if self._config.scales.residual != 1:
            self.output.scale(self._config.scales.residual)
        for part in self._parts:
            part.finish()

    def _reorder(self) -> None:
        """Permutes query and key rows, and head norms, so that rotated pairs are where the kernels expect them."""
        import torch

        from quire.services.worker.layers.attention.rotary import row_order

        config = self._config
        order = row_order(config.rope, config.head_dim)
        if order is None:
            return
        order = order.to(self._place.device)
        rows = torch.arange(self.qkv.out_features, device=order.device)  # values and other rows stay
        starts = torch.tensor(self._reordered_heads, device=order.device).unsqueeze(1) * config.head_dim
        rows[(starts + torch.arange(config.head_dim, device=order.device)).flatten()] = (starts + order).flatten()
        self.qkv.reorder(rows)
        for norm in self._norms:
            norm.weight.copy_(norm.weight[order])

    @property
    def _reordered_heads(self) -> list[int]:
        """Heads of the fused projection that are queries and keys, in memory order."""
        return [*range(self._heads.num_q + self._heads.num_kv)]

    @property
    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Norm weights of queries and keys, [head_dim] each; None without norms."""
        return (self._norms[0].weight, self._norms[1].weight) if self._norms else (None, None)

    def defer_all_reduce(self) -> None:
        """Leaves the output a rank's partial sum, which the caller adds up."""
        self.output.defer_all_reduce()

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Attends: x [num_tokens, hidden_size] -> the same shape."""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Projects x, normalizes and rotates queries and keys, and stores keys and values in the cache.

        Returns the queries, [num_tokens, num_q_heads, head_dim].
        """
        return self._store(self._projected(x), batch, cache, cos_sin)

    def _store(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Normalizes and rotates `qkv` [num_tokens, width], stores keys and values, and returns the queries."""
        q_weight, k_weight = self._norm_weights
        return self._ops.qk_norm_rope_store(
            qkv,
            q_weight,
            k_weight,
            self._config.rms_norm_eps,
            cos_sin,
            batch.positions,
            batch.slot_mapping,
            cache.k,
            cache.v,
            self._heads.num_q,
            self._heads.num_kv,
        )

    def _projected(self, x: Tensor) -> Tensor:
        """Returns concatenated queries, keys and values [num_tokens, width], before head norms and rotation."""
        return self.qkv(x)

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends with the queries of the tokens in `metadata` and projects the result; returns [num_tokens,
        hidden_size]."""
        return self.output(self._attended(q, cache, metadata).flatten(1))

    def _attended(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Returns attention results per head, [num_tokens, num_q_heads, head_dim]."""
        sinks = self._sinks.scores if self._sinks else None
        return self._backend.attend(
            q,
            cache.k,
            cache.v,
            metadata,
            scale=self._scale,
            window=self._window,
            sinks=sinks,
            softcap=self._softcap,
        )

    def run_row(
        self, kernels: RowKernels, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache
    ) -> None:
        """Adds attention of the normalized `residual` to it, in fused kernels; for steps of one token."""
        config = self._config
        attended = kernels.attention(
            kernels.linear(residual, self.qkv, norm=norm),
            self._norm_weights,
            config.rms_norm_eps,
            batch,
            cache,
            num_q_heads=self._heads.num_q,
            scale=self._scale,
            window=self._window,
        )
        kernels.linear_into(residual, attended, self.output)


def _select_heads(inputs: list[Projection], heads: HeadShare, config: DecoderConfig) -> list[Projection]:
    """Returns the query, key and value projections with this rank's rows, whether they are three tensors or one."""
    head_dim, fused = config.head_dim, len(inputs) == 1
    first_key, first_value = config.num_q_heads, config.num_q_heads + config.num_kv_heads
    taken = [
        head_features(heads.queries, head_dim if fused else inputs[0].out_features // config.num_q_heads),
        head_features(heads.keys, head_dim, first_key * head_dim if fused else 0),
        head_features(heads.keys, head_dim, first_value * head_dim if fused else 0),
    ]
    if fused:
        taken = [tuple(features for part in taken for features in part)]
    return [replace(part, taken=of_part) for part, of_part in zip(inputs, taken, strict=True)]
