"""Common parts of recurrent layers: sizes of the state, and the layer interface."""

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
    """Sizes of recurrent layers (heads, keys, values, convolution), and which layers are recurrent."""

    heads_field: ClassVar[str] = "linear_num_value_heads"  # field of config.json for num_heads

    num_heads: int  # value heads
    num_key_heads: int  # value heads are divided evenly among them
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]  # whether each layer is recurrent
    beside_attention: bool = field(default=False, kw_only=True)  # recurrent layers also have attention

    @property
    def keys(self) -> int:
        """Elements of a token's keys, all heads together; queries have the same number."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values, all heads together."""
        return self.num_heads * self.value_dim

    def heads_of(self, shard: Shard) -> HeadShare:
        """Returns a rank's value heads and the key heads they use, in order."""
        return shard.heads(self.num_heads, self.num_key_heads, self.heads_field)

    def of_rank(self, shard: Shard) -> Self:
        """Returns a rank's configuration: it keeps the states of its own heads; shared key heads are replicated."""
        share = self.heads_of(shard)
        return replace(self, num_heads=share.num_q, num_key_heads=share.num_kv)

    @property
    def state(self) -> StateShape:
        """Shape of a sequence's state in one layer: convolution inputs and a key_dim x value_dim matrix per head."""
        channels = 2 * self.keys + self.values
        return StateShape(channels, self.conv_width, self.num_heads, self.key_dim, self.value_dim)

    @property
    def spec(self) -> State:
        """KV specification of a layer, over all ranks together."""
        return State(self.state.num_words * WORD_BYTES)


class RecurrentLayer(ABC):
    """Recurrent layer with the interface of attention, used in place of it or besides it."""

    def __init__(self, output: Linear, parts: tuple[Loadable, ...]) -> None:
        """Takes the output projection and all parts with weights, `output` included."""
        self._output, self._parts = output, parts

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def defer_all_reduce(self) -> None:
        """Leaves the output a rank's partial sum, which the caller adds up."""
        self._output.defer_all_reduce()

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape."""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    @abstractmethod
    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Updates the rows' states in the cache; returns their outputs, [num_tokens, num_heads * value_dim]."""

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Projects the states' outputs `q` for the tokens in `metadata`; returns [num_tokens, hidden_size]. Reads no
        cache."""
        return self._output(q)
