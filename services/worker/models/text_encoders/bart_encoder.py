"""Encoder of BART and mBART (arXiv 1910.13461, 2001.08210): learned positions, and layers with norms after or before
each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.text_encoders.token_items import encode_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
    from quire.services.worker.models.vision.port import MediaInput

EPS = 1e-5
FIRST_ROW = 2  # of the table of positions
SHARED = "model.shared"  # embedding of encoder and decoder
COPIES = tuple(f"model.{part}.embed_tokens.weight" for part in ("encoder", "decoder"))


@dataclass(frozen=True, slots=True)
class BartSizes:
    """Sizes of the encoder."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    num_layers: int
    max_tokens: int
    activation: str
    scale: float  # of token embeddings
    norms_first: bool  # mBART: each part of a layer reads the normed stream, which has a norm after the last layer


def of_copies(embedding: Embedding) -> dict[str, Alternative]:
    """Returns the names under which files have the embedding instead of SHARED."""
    from quire.services.worker.layers.placement import Alternative  # needs torch

    ((name, destination),) = embedding.destinations()
    return {copy: Alternative(destination, (name,)) for copy in COPIES}


class BartEncoder:
    """MediaEncoder of prompts, whose rows are the hidden states of their tokens."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: BartSizes, place: LayerPlacement) -> None:
        self._sizes, name, size = sizes, "model.encoder", sizes.hidden_size
        self._embedding = Embedding(SHARED, sizes.vocab_size, size, place, sizes.scale)
        self._positions = Embedding(f"{name}.embed_positions", FIRST_ROW + sizes.max_tokens, size, place)
        self._first_norm = LayerNorm(f"{name}.layernorm_embedding", size, EPS, place)
        self._layers = [BartEncoderLayer(f"{name}.layers.{index}", sizes, place) for index in range(sizes.num_layers)]
        self._last_norm = [LayerNorm(f"{name}.layer_norm", size, EPS, place)] if sizes.norms_first else []

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Copies of the embedding, of which some files have only one."""
        return of_copies(self._embedding)

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (self._embedding, self._positions, self._first_norm, *self._layers, *self._last_norm)

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
        import torch

        count, length = token_ids.shape
        rows = torch.arange(FIRST_ROW, FIRST_ROW + length, dtype=torch.int32, device=token_ids.device)
        x = self._embedding(token_ids.reshape(-1).int()) + self._positions(rows).repeat(count, 1)
        x = self._first_norm(x)
        starts = torch.arange(count + 1, dtype=torch.int32, device=x.device) * length
        for layer in self._layers:
            x = layer(x, starts, length)
        for norm in self._last_norm:
            x = norm(x)
        return x.view(count, length, -1)


class BartEncoderLayer:
    """Layer with attention in both directions within each prompt."""

    def __init__(self, name: str, sizes: BartSizes, place: LayerPlacement) -> None:
        size, attention = sizes.hidden_size, f"{name}.self_attn"
        self._heads, self._norms_first = sizes.num_heads, sizes.norms_first
        self._inputs = Linear([Projection(f"{attention}.{part}_proj", size) for part in "qkv"], size, True, place)
        self._output = Linear([Projection(f"{attention}.out_proj", size)], size, True, place)
        self._first_norm = LayerNorm(f"{name}.self_attn_layer_norm", size, EPS, place)
        up, down = Projection(f"{name}.fc1", sizes.intermediate_size), Projection(f"{name}.fc2", size)
        self._mlp = PlainMLP(up, down, size, True, place, activation=sizes.activation)
        self._second_norm = LayerNorm(f"{name}.final_layer_norm", size, EPS, place)
        self._attend = place.ops.ragged_attention

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (self._inputs, self._output, self._first_norm, self._mlp, self._second_norm)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        return chain.from_iterable(part.destinations() for part in self._parts)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, starts: Tensor, length: int) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape. Prompt i has the tokens from starts[i] to
        starts[i + 1] (exclusive), `length` each."""
        if self._norms_first:
            x = x + self._attended(self._first_norm(x), starts, length)
            return x + self._mlp(self._second_norm(x))
        x = self._first_norm(x + self._attended(x, starts, length))
        return self._second_norm(x + self._mlp(x))

    def _attended(self, x: Tensor, starts: Tensor, length: int) -> Tensor:
        q, k, v = (part.reshape(x.size(0), self._heads, -1) for part in self._inputs(x).chunk(3, dim=-1))
        return self._output(self._attend(q, k, v, starts, length, q.size(-1) ** -0.5, 0, None).flatten(1))
