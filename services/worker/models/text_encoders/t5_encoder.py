"""Encoder of T5 (arXiv 1910.10683): pre-norm layers, and a bias for the distance between two tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.relative_attention import DistanceBuckets, RelativeBias
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.feed_forward.named_gates import NamedGatesMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.text_encoders.token_items import encode_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
    from quire.services.worker.models.vision.port import MediaInput


@dataclass(frozen=True, slots=True)
class T5Sizes:
    """Sizes of the encoder, and what the decoder has in common with it."""

    vocab_size: int
    hidden_size: int
    head_dim: int
    num_heads: int
    intermediate_size: int
    num_layers: int  # of the encoder
    max_tokens: int
    eps: float
    activation: str
    is_gated: bool
    num_buckets: int
    max_distance: int
    bias_by_layer: bool  # each layer has its own biases (UMT5), else the first one's

    def buckets(self, *, has_future: bool) -> DistanceBuckets:
        return DistanceBuckets(self.num_buckets, self.max_distance, has_future)

    def feed_forward(self, name: str, place: LayerPlacement) -> PlainMLP | NamedGatesMLP:
        """Returns the feed-forward layer of this name without weights."""
        size, width = self.hidden_size, self.intermediate_size
        if self.is_gated:
            names = (f"{name}.wi_0", f"{name}.wi_1", f"{name}.wo")
            return NamedGatesMLP(names, size, width, place, activation=self.activation)
        up, down = Projection(f"{name}.wi", width), Projection(f"{name}.wo", size)
        return PlainMLP(up, down, size, False, place, activation=self.activation)


class T5Encoder:
    """MediaEncoder of prompts, whose rows are the hidden states of their tokens."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: T5Sizes, place: LayerPlacement) -> None:
        self._sizes = sizes
        self._embedding = Embedding("shared", sizes.vocab_size, sizes.hidden_size, place)
        self._layers = [T5EncoderLayer(f"encoder.block.{index}", sizes, place) for index in range(sizes.num_layers)]
        with_bias = self._layers if sizes.bias_by_layer else self._layers[:1]
        self._biases = [
            RelativeBias(
                f"{layer.name}.layer.0.SelfAttention.relative_attention_bias",
                sizes.num_heads,
                sizes.buckets(has_future=True),
                sizes.max_tokens,
                place,
            )
            for layer in with_bias
        ]
        self._norm = RMSNorm("encoder.final_layer_norm", sizes.hidden_size, sizes.eps, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (self._embedding, *self._layers, *self._biases, self._norm)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        return chain.from_iterable(part.destinations() for part in self._parts)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of prompts, [num_tokens, hidden_size] each. Raises InvalidArgument for items that are no
        prompt for this encoder."""
        sizes = self._sizes
        return encode_prompts(items, self, vocab_size=sizes.vocab_size, max_tokens=sizes.max_tokens)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Computes hidden states: int64 [num_prompts, num_tokens] -> [num_prompts, num_tokens, hidden_size]."""
        count, length = token_ids.shape
        x = self._embedding(token_ids.reshape(-1).int())
        biases = [bias.square(length).to(x.dtype) for bias in self._biases]
        for index, layer in enumerate(self._layers):
            x = layer(x, biases[index if self._sizes.bias_by_layer else 0], count)
        return self._norm(x).view(count, length, -1)


class T5EncoderLayer:
    """Pre-norm layer with attention in both directions within each prompt."""

    def __init__(self, name: str, sizes: T5Sizes, place: LayerPlacement) -> None:
        """Builds the layer without weights; its biases are the encoder's."""
        self.name = name
        size, inner, attention = sizes.hidden_size, sizes.num_heads * sizes.head_dim, f"{name}.layer.0.SelfAttention"
        self._heads = sizes.num_heads
        self._first_norm = RMSNorm(f"{name}.layer.0.layer_norm", size, sizes.eps, place)
        self._inputs = Linear([Projection(f"{attention}.{part}", inner) for part in "qkv"], size, False, place)
        self._output = Linear([Projection(f"{attention}.o", size)], inner, False, place)
        self._second_norm = RMSNorm(f"{name}.layer.1.layer_norm", size, sizes.eps, place)
        self._mlp = sizes.feed_forward(f"{name}.layer.1.DenseReluDense", place)

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (self._first_norm, self._inputs, self._output, self._second_norm, self._mlp)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        return chain.from_iterable(part.destinations() for part in self._parts)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, bias: Tensor, count: int) -> Tensor:
        """Runs the layer: x [count * num_tokens, hidden_size] -> the same shape. `bias`: [num_heads, num_tokens,
        num_tokens]."""
        from torch.nn import functional

        parts = self._inputs(self._first_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.reshape(count, -1, self._heads, part.size(-1) // self._heads).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = x + self._output(attended.transpose(1, 2).reshape(x.size(0), -1))
        return x + self._mlp(self._second_norm(x))
