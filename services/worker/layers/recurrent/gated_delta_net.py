"""A recurrent layer in place of attention: a short convolution, the gated delta rule, a gate (arXiv 2412.06464).

What it keeps of the tokens before is a state of fixed size, in the pages that hold other layers' keys and values
(kernels/state_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.state_pages import WORD_BYTES, StatePages, StateShape
from services.worker.layers.linear import Linear, Projection
from services.worker.layers.norm.rms_norm import RMSNorm
from services.worker.layers.recurrent.recurrence import Recurrence, Rows, Tensors
from shared.errors import InvalidArgument
from shared.kv.kv_specs import State

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from services.worker.attention.port import AttentionMetadata
    from services.worker.kv.kv_cache import LayerCache
    from services.worker.layers.placement import Destination, Loadable, Placement
    from services.worker.models.config.decoder_config import DecoderConfig
    from services.worker.models.single_row import RowKernels
    from services.worker.step.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of the recurrent layers, and which layers they are."""

    num_key_heads: int
    num_heads: int  # of values; as many read one key
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]  # by layer: whether it is recurrent

    @property
    def state(self) -> StateShape:
        channels = 2 * self.keys + self.values
        return StateShape(channels, self.conv_width, self.num_heads, self.key_dim, self.value_dim)

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def spec(self) -> State:
        return State(self.state.num_words * WORD_BYTES)


class HeadRates:
    """A parameter for each head, in float32."""

    def __init__(self, name: str, num_heads: int, place: Placement) -> None:
        self._name = name
        self.values: Tensor = place.empty(num_heads).float()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield self._name, self.values

    def finish(self) -> None:
        """Used as it is."""


class Convolution:
    """Its weights."""

    def __init__(self, name: str, num_channels: int, width: int, place: Placement, *, bias: bool = False) -> None:
        self._name = name
        self._given: Tensor = place.empty(num_channels, 1, width)
        self.weight: Tensor = self._given.squeeze(1)
        self.bias: Tensor | None = place.empty(num_channels) if bias else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self._given
        if self.bias is not None:
            yield f"{self._name}.bias", self.bias

    def reorder(self, channels: Tensor) -> None:
        for part in (self.weight, self.bias):
            if part is not None:
                part.copy_(part[channels])

    def finish(self) -> None:
        """Used as they are."""


class GatedDeltaNet:
    """As Qwen3-Next has it: projections of a key head, and of the values that read it, lie side by side."""

    def __init__(self, name: str, config: DecoderConfig, place: Placement) -> None:
        sizes = config.recurrent
        assert isinstance(sizes, DeltaConfig)
        if not place.shard.is_whole:
            text = f"{place.shard.size} ranks: recurrent layers are not cut among ranks"
            raise InvalidArgument(f"tensor_parallel_size: {text}", field="tensor_parallel_size")
        hidden = config.hidden_size
        self._sizes, self._ops, self._place = sizes, place.ops, place
        shape = self._shape = sizes.state
        size = 2 * sizes.keys + 2 * sizes.values
        self._mixed = Linear([Projection(f"{name}.in_proj_qkvz", size)], hidden, False, place)
        self._gates = Linear([Projection(f"{name}.in_proj_ba", 2 * sizes.num_heads)], hidden, False, place)
        self._convolution = Convolution(f"{name}.conv1d", shape.num_channels, shape.conv_width, place)
        self._recurrence = Recurrence()
        self._rate = HeadRates(f"{name}.A_log", sizes.num_heads, place)
        self._step_bias = HeadRates(f"{name}.dt_bias", sizes.num_heads, place)
        self._norm = RMSNorm(f"{name}.norm", sizes.value_dim, config.rms_norm_eps, place)
        self._output = Linear([Projection(f"{name}.out_proj", hidden)], sizes.values, False, place)
        self._parts: tuple[Loadable, ...] = (
            self._mixed,
            self._gates,
            self._convolution,
            self._rate,
            self._step_bias,
            self._norm,
            self._output,
        )

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        self._arrange()
        for part in self._parts:
            part.finish()
        self._rate.values.exp_().neg_()

    def _arrange(self) -> None:
        """Queries of all heads, then their keys, values and gates; strengths of all heads, then their steps."""
        sizes, device = self._sizes, self._place.device
        values = sizes.values // sizes.num_key_heads
        self._mixed.reorder(_side_by_side((sizes.key_dim, sizes.key_dim, values, values), sizes.num_key_heads, device))
        each = sizes.num_heads // sizes.num_key_heads
        self._gates.reorder(_side_by_side((each, each), sizes.num_key_heads, device))

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Changes the states; returns what they gave, [num_tokens, num_heads * value_dim]."""
        sizes, ops, pages = self._sizes, self._ops, StatePages(cache.k, cache.v, self._shape)
        mixed = self._mixed(x)

        def change(given: Tensors, rows: Rows) -> Tensors:
            where = (pages, *rows, cache.block_size)
            strength, step = given[1].chunk(2, dim=1)
            qkv = ops.short_convolution(given[0], self._convolution.weight, *where)
            return (ops.gated_delta_rule(qkv, strength, step, self._rate.values, self._step_bias.values, *where),)

        (found,) = self._recurrence.run((mixed[:, : self._shape.num_channels], self._gates(x)), batch, change)
        return ops.gated_norm(found, mixed[:, mixed.size(1) - sizes.values :], self._norm.weight, self._norm.eps)

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """What the states gave to the tokens in `metadata` -> [num_tokens, hidden_size]"""
        return self._output(q)

    def run_row(
        self, kernels: RowKernels, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache
    ) -> None:
        raise AssertionError("not offered: the fused chain has no recurrent layers")


def _side_by_side(sizes: tuple[int, ...], num_groups: int, device: torch.device) -> Tensor:
    """Of features that lie in groups, each with parts of these sizes, all of the first part, then of the second, ..."""
    import torch

    features = torch.arange(num_groups * sum(sizes), device=device).view(num_groups, -1)
    return torch.cat([part.flatten() for part in features.split(sizes, dim=1)])
