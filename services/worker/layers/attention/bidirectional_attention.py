"""Attention of encoders: each token sees its whole prompt or a window around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.services.worker.layers.linear import Linear, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.encoders.encoder_config import EncoderConfig


class BidirectionalAttention:
    """Encoder attention: projections around the kernel ragged_attention, without a KV cache, on one rank."""

    def __init__(
        self,
        inputs: Sequence[Projection],
        output: Projection,
        config: EncoderConfig,
        place: LayerPlacement,
        *,
        layer: int,
    ) -> None:
        """Builds the attention of the layer at index `layer`, whose window the configuration gives.

        `inputs`: projections of queries, keys and values, in this order, in one tensor or three.
        """
        self._input = Linear(inputs, config.hidden_size, config.attention_bias, place)
        self._output = Linear([output], config.hidden_size, config.attention_bias, place)
        self._heads, self._head_dim, self._reach = config.num_heads, config.head_dim, config.half_window(layer)
        self._is_rotated = bool(config.ropes)
        self._attend, self._rotate = place.ops.ragged_attention, place.ops.rotate_pairs

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._input.destinations()
        yield from self._output.destinations()

    def finish(self) -> None:
        self._input.finish()
        self._output.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Attends within each prompt of the step, or within a window around each token: x [num_tokens, hidden_size] ->
        the same shape."""
        qkv = self._input(x).view(x.size(0), 3, self._heads, self._head_dim)
        if self._is_rotated:
            self._rotate(qkv[:, :2], cos_sin.index_select(0, batch.positions))
        q, k, v = qkv.unbind(1)
        metadata = batch.attention
        assert metadata.query_start is not None
        attended = self._attend(
            q, k, v, metadata.query_start, metadata.max_query_len, self._head_dim**-0.5, self._reach, batch.num_seen
        )
        return self._output(attended.flatten(1))
