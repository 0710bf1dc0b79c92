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
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._output = Linear([output], self._heads * self._head_dim, config.attention_bias, place)
        self._reach = config.half_window(layer)
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
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._input(x).view(x.size(0), heads + 2 * kv_heads, self._head_dim)
        if self._is_rotated:
            self._rotate(qkv[:, : heads + kv_heads].unsqueeze(1), cos_sin.index_select(0, batch.positions))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if kv_heads < heads:  # the kernel takes as many heads of keys and values, with equal strides
            q, k, v = (part.repeat_interleave(heads // part.size(1), dim=1) for part in (q, k, v))
        return self._output(self._attended(q, k, v, batch).flatten(1))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Computes attention, [num_tokens, num_heads, head_dim] each and of the result."""
        metadata = batch.attention
        assert metadata.query_start is not None
        scale, seen = self._head_dim**-0.5, batch.num_seen
        return self._attend(q, k, v, metadata.query_start, metadata.max_query_len, scale, self._reach, seen)


class CausalPromptAttention(BidirectionalAttention):
    """Attention of encoders whose tokens see only earlier ones, of prompts that are computed in one step."""

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Computes attention of the step's prompts as rows of equal length: no token sees the padding after it."""
        import torch
        from torch.nn import functional

        metadata = batch.attention
        assert metadata.query_start is not None
        starts, longest, total = metadata.query_start.long(), metadata.max_query_len, q.size(0)
        prompts = torch.arange(starts.numel() - 1, device=q.device)
        of_tokens = prompts.repeat_interleave(starts.diff(), output_size=total)
        places = of_tokens * longest + torch.arange(total, device=q.device) - starts[of_tokens]

        def padded(part: Tensor) -> Tensor:
            """Returns [num_prompts, num_heads, longest, head_dim]."""
            rows = part.new_zeros(prompts.numel() * longest, *part.shape[1:])
            return rows.index_copy_(0, places, part).view(-1, longest, *part.shape[1:]).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(padded(q), padded(k), padded(v), is_causal=True)
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, places)
