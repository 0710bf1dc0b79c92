"""A recurrent layer in place of attention: a short convolution, the gated delta rule, a gate (arXiv 2412.06464).

What it keeps of the tokens before is a state of fixed size, in the pages that hold other layers' keys and values
(kernels/state_pages.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.state_pages import StatePages
from services.worker.layers.linear import Linear, Projection
from services.worker.layers.norm.rms_norm import RMSNorm
from services.worker.layers.recurrent.layer import RecurrentLayer, refuse_ranks
from services.worker.layers.recurrent.parameters import Convolution, HeadRates
from services.worker.layers.recurrent.recurrence import Recurrence, Rows, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from services.worker.kv.kv_cache import LayerCache
    from services.worker.layers.placement import Placement
    from services.worker.models.config.decoder_config import DecoderConfig
    from services.worker.step.forward_batch import ForwardBatch


class GatedDeltaNet(RecurrentLayer):
    """As Qwen3-Next has it: projections of a key head, and of the values that read it, lie side by side."""

    def __init__(self, name: str, config: DecoderConfig, place: Placement) -> None:
        sizes = config.recurrent
        assert sizes is not None, "its family reads them"
        refuse_ranks(place)
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
        output = Linear([Projection(f"{name}.out_proj", hidden)], sizes.values, False, place)
        own = (self._mixed, self._gates, self._convolution, self._rate, self._step_bias, self._norm)
        super().__init__(output, (*own, output))

    def finish(self) -> None:
        self._arrange()
        super().finish()
        self._rate.values.exp_().neg_()

    def _arrange(self) -> None:
        """Queries of all heads, then their keys, values and gates; strengths of all heads, then their steps."""
        sizes, device = self._sizes, self._place.device
        values = sizes.values // sizes.num_key_heads
        self._mixed.reorder(_side_by_side((sizes.key_dim, sizes.key_dim, values, values), sizes.num_key_heads, device))
        each = sizes.num_heads // sizes.num_key_heads
        self._gates.reorder(_side_by_side((each, each), sizes.num_key_heads, device))

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        sizes, ops, pages = self._sizes, self._ops, StatePages(cache.k, cache.v, self._shape)
        mixed = self._mixed(x)

        def change(given: Tensors, rows: Rows) -> Tensors:
            where = (pages, *rows, cache.block_size)
            strength, step = given[1].chunk(2, dim=1)
            qkv = ops.short_convolution(given[0], self._convolution.weight, *where)
            return (ops.gated_delta_rule(qkv, strength, step, self._rate.values, self._step_bias.values, *where),)

        (found,) = self._recurrence.run((mixed[:, : self._shape.num_channels], self._gates(x)), batch, change)
        return ops.gated_norm(found, mixed[:, mixed.size(1) - sizes.values :], self._norm.weight, self._norm.eps)


def _side_by_side(sizes: tuple[int, ...], num_groups: int, device: torch.device) -> Tensor:
    """Of features that lie in groups, each with parts of these sizes, all of the first part, then of the second, ..."""
    import torch

    features = torch.arange(num_groups * sum(sizes), device=device).view(num_groups, -1)
    return torch.cat([part.flatten() for part in features.split(sizes, dim=1)])
