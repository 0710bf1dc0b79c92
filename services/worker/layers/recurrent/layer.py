"""What recurrent layers are alike in: the sizes of a state, and how a block of a model sees the layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from quire.kernels.state_pages import WORD_BYTES, StateShape
from quire.services.worker.layers.linear import Linear
from quire.shared.kv.kv_specs import State

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, Loadable
    from quire.services.worker.layers.sharding import HeadShare, Shard


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Sizes of the recurrent layers, and which layers they are."""

    heads_field: ClassVar[str] = "linear_num_value_heads"  # of config.json: says num_heads

    num_heads: int  # of values
    num_key_heads: int  # as many heads of values have one in common
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]  # by layer: whether it is recurrent
    beside_attention: bool = field(default=False, kw_only=True)  # the recurrent layers have keys and values as well

    @property
    def keys(self) -> int:
        """Elements of a token's keys, all heads together; its queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    def heads_of(self, shard: Shard) -> HeadShare:
        """Heads of values, and the key heads that these have; both stay in their order."""
        return shard.heads(self.num_heads, self.num_key_heads, self.heads_field)

    def of_rank(self, shard: Shard) -> Self:
        """What a rank has. It keeps the states of its own heads; key heads that ranks share are there on each."""
        share = self.heads_of(shard)
        return replace(self, num_heads=share.num_q, num_key_heads=share.num_kv)

    @property
    def state(self) -> StateShape:
        channels = 2 * self.keys + self.values
        return StateShape(channels, self.conv_width, self.num_heads, self.key_dim, self.value_dim)

    @property
    def spec(self) -> State:
        """Of a layer; where it is cut, of all ranks together."""
        return State(self.state.num_words * WORD_BYTES)


class RecurrentLayer(ABC):
    """In place of attention, or beside it."""

    def __init__(self, output: Linear, parts: tuple[Loadable, ...]) -> None:
        """`parts`: whatever has weights, `output` included."""
        self._output, self._parts = output, parts

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def defer_all_reduce(self) -> None:
        """Makes the output a rank's partial sum, which the caller adds up."""
        self._output.defer_all_reduce()

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    @abstractmethod
    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Changes the states; returns what they gave, [num_tokens, num_heads * value_dim]."""

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """What the states gave to the tokens in `metadata` -> [num_tokens, hidden_size]"""
        return self._output(q)
