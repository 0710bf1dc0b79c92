"""Conformer (arXiv 2005.08100) of Granite Speech: attention within blocks of fixed length, with relative positions
(arXiv 1803.02155), and a prediction of characters that is fed back in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.models.audio.named_tensors import NamedTensors, linear_shapes, norm_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement

BATCH_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class ConformerSizes:
    """Sizes in the names of encoder_config, where these say what they are."""

    input_dim: int
    num_layers: int
    hidden_dim: int
    feed_forward: int
    num_heads: int
    head_dim: int
    output_dim: int  # characters
    context_size: int  # positions of a block
    max_distance: int
    kernel_size: int
    inner_dim: int  # of the convolutions


class Conformer:
    """Encoder of one clip."""

    def __init__(self, name: str, sizes: ConformerSizes, place: LayerPlacement) -> None:
        hidden = sizes.hidden_dim
        shapes = {
            **linear_shapes("input_linear", hidden, sizes.input_dim),
            **linear_shapes("out", sizes.output_dim, hidden),
            **linear_shapes("out_mid", hidden, sizes.output_dim),
        }
        self._middle, self._edges = sizes.num_layers // 2, NamedTensors(name, shapes, place)
        self._blocks = [ConformerBlock(f"{name}.layers.{index}", sizes, place) for index in range(sizes.num_layers)]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._edges.destinations()
        for block in self._blocks:
            yield from block.tensors.destinations()

    def __call__(self, features: Tensor) -> Tensor:
        """Computes hidden states: [length, input_dim] -> [length, hidden_dim]."""
        x = self._edges.linear("input_linear", features)
        for number, block in enumerate(self._blocks, 1):
            x = block(x)
            if number == self._middle:
                x = x + self._edges.linear("out_mid", self._edges.linear("out", x).softmax(-1))
        return x


class ConformerBlock:
    """Half a feed-forward layer, attention, convolution and another half, and a norm."""

    def __init__(self, name: str, sizes: ConformerSizes, place: LayerPlacement) -> None:
        self._sizes = sizes
        self.tensors = NamedTensors(name, _block_shapes(sizes), place)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the block: [length, hidden_dim] -> the same shape."""
        x = 0.5 * self._fed_forward("ff1", x) + x
        x = self._attended(x) + x
        x = self._convolved(x) + x
        x = 0.5 * self._fed_forward("ff2", x) + x
        return self.tensors.normed("post_norm", x)

    def _fed_forward(self, name: str, x: Tensor) -> Tensor:
        from torch.nn import functional

        up = self.tensors.linear(f"{name}.up_proj", self.tensors.normed(f"{name}.pre_norm", x))
        return self.tensors.linear(f"{name}.down_proj", functional.silu(up))

    def _attended(self, x: Tensor) -> Tensor:
        """Returns attention of each position to those of its block; the last block may be shorter."""
        import torch

        x = self.tensors.normed("attn.pre_norm", x)
        q = self.tensors.linear("attn.to_q", x)
        k, v = self.tensors.linear("attn.to_kv", x).chunk(2, dim=-1)
        size = self._sizes.context_size
        blocks = [self._block(*parts) for parts in zip(*(part.split(size) for part in (q, k, v)), strict=True)]
        return self.tensors.linear("attn.to_out", torch.cat(blocks))

    def _block(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends within one block, [length, heads * head_dim] each."""
        import torch
        from torch.nn import functional

        sizes, scale = self._sizes, self._sizes.head_dim**-0.5
        q, k, v = (part.view(part.size(0), sizes.num_heads, sizes.head_dim).transpose(0, 1) for part in (q, k, v))
        places = torch.arange(q.size(1), device=q.device)
        table = self.tensors["attn.rel_pos_emb.weight"][places[:, None] - places + sizes.max_distance]
        bias = torch.einsum("hcd,crd->hcr", q, table) * scale
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return attended.transpose(0, 1).flatten(1)

    def _convolved(self, x: Tensor) -> Tensor:
        """Returns the depthwise convolution over neighbouring positions, of gated features."""
        from torch.nn import functional

        kernel = self._sizes.kernel_size
        x = self.tensors.normed("conv.norm", x).t().unsqueeze(0)
        x = functional.conv1d(x, self.tensors["conv.up_conv.weight"], self.tensors["conv.up_conv.bias"])
        x = functional.pad(functional.glu(x, dim=1), (kernel // 2, kernel // 2 - (kernel + 1) % 2))
        x = functional.conv1d(x, self.tensors["conv.depth_conv.conv.weight"], groups=self._sizes.inner_dim)
        mean, var = (self.tensors[f"conv.batch_norm.running_{part}"] for part in ("mean", "var"))
        weight, bias = (self.tensors[f"conv.batch_norm.{part}"] for part in ("weight", "bias"))
        x = functional.silu(functional.batch_norm(x, mean, var, weight, bias, eps=BATCH_NORM_EPS))
        x = functional.conv1d(x, self.tensors["conv.down_conv.weight"], self.tensors["conv.down_conv.bias"])
        return x[0].t()


def _block_shapes(sizes: ConformerSizes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a block's tensors by name."""
    hidden, inner, heads = sizes.hidden_dim, sizes.inner_dim, sizes.num_heads * sizes.head_dim
    shapes = {**norm_shapes("post_norm", hidden), **norm_shapes("attn.pre_norm", hidden)}
    for name in ("ff1", "ff2"):
        shapes |= norm_shapes(f"{name}.pre_norm", hidden)
        shapes |= linear_shapes(f"{name}.up_proj", sizes.feed_forward, hidden)
        shapes |= linear_shapes(f"{name}.down_proj", hidden, sizes.feed_forward)
    return {
        **shapes,
        **linear_shapes("attn.to_q", heads, hidden, bias=False),
        **linear_shapes("attn.to_kv", 2 * heads, hidden, bias=False),
        **linear_shapes("attn.to_out", hidden, heads),
        "attn.rel_pos_emb.weight": (2 * sizes.max_distance + 1, sizes.head_dim),
        **norm_shapes("conv.norm", hidden),
        "conv.up_conv.weight": (2 * inner, hidden, 1),
        "conv.up_conv.bias": (2 * inner,),
        "conv.depth_conv.conv.weight": (inner, 1, sizes.kernel_size),
        **norm_shapes("conv.batch_norm", inner),
        "conv.batch_norm.running_mean": (inner,),
        "conv.batch_norm.running_var": (inner,),
        "conv.down_conv.weight": (hidden, inner, 1),
        "conv.down_conv.bias": (hidden,),
    }
