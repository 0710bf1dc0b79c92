"""State space layer (Mamba 2, arXiv 2405.21060): a short convolution, a scan, a gate and usually a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.kernels.state_pages import StatePages
from quire.services.worker.layers.linear import Linear, Projection, by_rows
from quire.services.worker.layers.norm.grouped_rms_norm import GroupedRMSNorm
from quire.services.worker.layers.recurrent.layer import RecurrentConfig, RecurrentLayer
from quire.services.worker.layers.recurrent.parameters import Convolution, HeadRates
from quire.services.worker.layers.recurrent.recurrence import Recurrence, Rows, Tensors
from quire.services.worker.layers.sharding import HeadShare, head_features

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class SpaceConfig(RecurrentConfig):
    """Sizes and variants of a state space: keys are the state's inputs (B), queries its outputs (C)."""

    heads_field: ClassVar[str] = "mamba_n_heads"

    conv_bias: bool
    input_bias: bool  # bias of the input projection
    output_bias: bool
    has_norm: bool = True  # norm per group of heads with a common key
    norm_before_gate: bool = False


@dataclass(frozen=True, slots=True)
class SpaceScales:
    """Constant multipliers that are folded into the projections' weights."""

    input: float = 1.0
    parts: tuple[float, ...] = (1.0,) * 5  # of the projection: gates, values, B, C, step sizes
    output: float = 1.0


class StateSpace(RecurrentLayer):
    """State space layer of Mamba 2; this rank has a part of the heads.

    The checkpoint orders convolution channels as values, B, C; here they are C, B, values, as the kernels' queries,
    keys and values.
    """

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        place: LayerPlacement,
        scales: SpaceScales | None = None,
        *,
        reduce_results: bool = True,
    ) -> None:
        """Builds this rank's part without weights.

        `scales`: multipliers of the family; None: only the residual scale. `reduce_results`: all-reduces the output,
        else it stays a partial sum.
        """
        whole = config.recurrent
        assert isinstance(whole, SpaceConfig)
        hidden, heads, total = config.hidden_size, whole.heads_of(place.shard), whole.num_heads
        self._sizes = whole.of_rank(place.shard)
        self._ops, self._place, self._shape = place.ops, place, self._sizes.state
        self._scales = scales or SpaceScales(output=config.scales.residual)
        self._mixed = Linear([_input(name, whole, heads)], hidden, whole.input_bias, place)
        channels = _channels(whole, heads), whole.state.num_channels
        self._convolution = Convolution(f"{name}.conv1d", *channels, whole.conv_width, place, bias=whole.conv_bias)
        self._recurrence = Recurrence()
        self._rate = HeadRates(f"{name}.A_log", heads.queries, total, place)
        self._step_bias = HeadRates(f"{name}.dt_bias", heads.queries, total, place)
        self._past_state = HeadRates(f"{name}.D", heads.queries, total, place)
        self._norm: GroupedRMSNorm | None = None
        if whole.has_norm:
            groups = heads, whole.num_key_heads
            self._norm = GroupedRMSNorm(f"{name}.norm", *groups, whole.values, place, eps=config.rms_norm_eps)
        (columns,) = head_features(heads.queries, whole.value_dim)
        outputs = [Projection(f"{name}.out_proj", hidden)]
        output = Linear(outputs, whole.values, whole.output_bias, place, columns=columns, reduce_results=reduce_results)
        own = (self._mixed, self._convolution, self._rate, self._step_bias, self._past_state)
        super().__init__(output, (*own, *([] if self._norm is None else [self._norm]), output))

    def finish(self) -> None:
        """Folds in the scales, reorders and packs the loaded weights, and replaces A_log by the decay rates
        -exp(A_log)."""
        sizes, scales = self._sizes, self._scales
        if scales.input != 1 or any(scale != 1 for scale in scales.parts):
            parts = (sizes.values, sizes.values, sizes.keys, sizes.keys, sizes.num_heads)
            self._mixed.scale(by_rows(scales.parts, parts), scales.input)
        if scales.output != 1:
            self._output.scale(scales.output)
        self._reorder()
        super().finish()
        self._rate.values.exp_().neg_()

    def _reorder(self) -> None:
        """Permutes the input projection to C, B, values, gates, step sizes, and the convolution's channels to C, B,
        values."""
        import torch

        sizes, device = self._sizes, self._place.device
        channels = torch.arange(self._shape.num_channels, device=device)
        values, ins, outs = channels.split((sizes.values, sizes.keys, sizes.keys))
        turned = torch.cat((outs, ins, values))
        self._convolution.reorder(turned)
        gates = torch.arange(sizes.values, device=device)
        steps = torch.arange(sizes.num_heads, device=device) + sizes.values + len(channels)
        self._mixed.reorder(torch.cat((turned + sizes.values, gates, steps)))

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Stores the step in the cache: runs projection, convolution and scan, which update the states in its pages.

        Returns the gated (and usually normalized) outputs, [num_tokens, num_heads * value_dim].
        """
        sizes, ops, channels = self._sizes, self._ops, self._shape.num_channels
        pages, conv = StatePages(cache.k, cache.v, self._shape), self._convolution
        mixed, gates, steps = self._mixed(x).split((channels, sizes.values, sizes.num_heads), dim=1)

        def change(inputs: Tensors, rows: Rows) -> Tensors:
            """Updates states by convolution and scan; returns the scan's outputs and the convolved values."""
            where = (pages, *rows, cache.block_size)
            qkv = ops.short_convolution(inputs[0], conv.weight, *where, conv.bias)
            found = ops.state_space_scan(qkv, inputs[1], self._rate.values, self._step_bias.values, *where)
            return found, qkv[:, 2 * sizes.keys :]

        found, values = self._recurrence.run((mixed, steps), batch, change)
        return self._gated(found, values, gates)

    def _gated(self, found: Tensor, values: Tensor, gates: Tensor) -> Tensor:
        """Adds the skip connection (D), then applies gate and norm, or norm and gate; returns [num_tokens, num_heads *
        value_dim]."""
        from torch.nn import functional

        sizes = self._sizes
        past = values.unflatten(1, (sizes.num_heads, sizes.value_dim)).float() * self._past_state.values[:, None]
        inputs: Tensor = (found.float() + past).flatten(1)
        gates = functional.silu(gates.float())
        if self._norm is not None and sizes.norm_before_gate:
            inputs = self._norm(inputs.to(found.dtype))
        gated: Tensor = (inputs * gates).to(found.dtype)
        return gated if self._norm is None or sizes.norm_before_gate else self._norm(gated)


def _input(name: str, whole: SpaceConfig, heads: HeadShare) -> Projection:
    """Returns the input projection with this rank's rows: gates, convolution channels, step sizes."""
    gates = head_features(heads.queries, whole.value_dim)
    channels = _channels(whole, heads, whole.values)
    first_step = whole.values + whole.state.num_channels
    steps = head_features(heads.queries, 1, first_step)
    return Projection(f"{name}.in_proj", first_step + whole.num_heads, taken=(*gates, *channels, *steps))


def _channels(whole: SpaceConfig, heads: HeadShare, offset: int = 0) -> tuple[range, ...]:
    """Returns this rank's channels, as ranges of the model's: values, B, C; `offset`: of the first channel."""
    first = offset + whole.values
    ins, outs = (head_features(heads.keys, whole.key_dim, start) for start in (first, first + whole.keys))
    return (*head_features(heads.queries, whole.value_dim, offset), *ins, *outs)
