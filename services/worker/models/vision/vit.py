"""The vision transformer (arXiv 2010.11929) as CLIP and SigLIP have it: patches, learned positions, pre-norm layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Sizes and variants of a vision transformer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are run
    num_heads: int
    patch_size: int  # pixels on a side
    image_size: int  # pixels on a side
    norm_eps: float
    activation: str
    has_class_token: bool  # in front of the patches; with a norm before the first layer, and no bias of the patches

    @property
    def num_patches(self) -> int:
        """Patches of one picture, without the class token."""
        return (self.image_size // self.patch_size) ** 2


def read_vit(config: ConfigFile, *, layer: int) -> ViTConfig:
    """Reads a `vision_config`. Raises InvalidArgument for unknown towers and layers out of range.

    `layer`: the hidden state that is used, in the count of transformers: 0 is the input of the first layer, -1 the
    output of the last.
    """
    kind = config.text("model_type")
    if kind not in (CLIP, SIGLIP):
        raise InvalidArgument(
            f"config.json: vision_config.model_type is {kind!r}; {CLIP} and {SIGLIP} are supported", field="model"
        )
    depth = config.integer("num_hidden_layers", 12)
    if not -depth - 1 <= layer <= depth:
        raise InvalidArgument(f"config.json: vision_feature_layer is {layer}, of {depth} layers", field="model")
    return ViTConfig(
        hidden_size=config.integer("hidden_size", 768),
        intermediate_size=config.integer("intermediate_size", 3072),
        num_layers=layer % (depth + 1),
        num_heads=config.integer("num_attention_heads", 12),
        patch_size=config.integer("patch_size", 32 if kind == CLIP else 16),
        image_size=config.integer("image_size", 224),
        norm_eps=config.number("layer_norm_eps", 1e-5 if kind == CLIP else 1e-6),
        activation=config.text("hidden_act", "quick_gelu" if kind == CLIP else "gelu_pytorch_tanh"),
        has_class_token=kind == CLIP,
    )


class ViT:
    """Vision transformer that turns pictures of one size into hidden states of their patches."""

    def __init__(self, name: str, config: ViTConfig, place: LayerPlacement) -> None:
        size = config.hidden_size
        self.config, self._name, self._place = config, name, place
        self._patches: Tensor = place.empty(size, 3, config.patch_size, config.patch_size)
        self._patch_bias: Tensor | None = None if config.has_class_token else place.empty(size)
        self._class: Tensor | None = place.empty(size) if config.has_class_token else None
        self._positions: Tensor = place.empty(config.num_patches + config.has_class_token, size)
        self._first_norm = (
            LayerNorm(f"{name}.pre_layrnorm", size, config.norm_eps, place) if config.has_class_token else None
        )
        self._layers = [ViTLayer(f"{name}.encoder.layers.{index}", config, place) for index in range(config.num_layers)]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.embeddings.patch_embedding.weight", self._patches
        if self._patch_bias is not None:
            yield f"{self._name}.embeddings.patch_embedding.bias", self._patch_bias
        if self._class is not None:
            yield f"{self._name}.embeddings.class_embedding", self._class
        yield f"{self._name}.embeddings.position_embedding.weight", self._positions
        if self._first_norm is not None:
            yield from self._first_norm.destinations()
        for layer in self._layers:
            yield from layer.destinations()

    def finish(self) -> None:
        if self._first_norm is not None:
            self._first_norm.finish()
        for layer in self._layers:
            layer.finish()

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes hidden states [num_pictures, num_patches, hidden_size], without the class token.

        `pixels` [num_pictures, 3, image_size, image_size], normalized, in the tower's dtype.
        """
        import torch

        x = self._embed(pixels)
        num_pictures, length, size = x.shape
        starts = torch.arange(num_pictures + 1, dtype=torch.int32, device=x.device) * length
        x = x.contiguous().view(num_pictures * length, size)
        if self._first_norm is not None:
            x = self._first_norm(x)
        for layer in self._layers:
            x = layer(x, starts, length)
        x = x.view(num_pictures, length, size)
        return x if self._class is None else x[:, 1:]

    def _embed(self, pixels: Tensor) -> Tensor:
        """Returns patch plus position embeddings, [num_pictures, num_patches and the class token, hidden_size]."""
        import torch
        from torch.nn import functional

        patches = functional.conv2d(pixels, self._patches, self._patch_bias, stride=self.config.patch_size)
        x = patches.flatten(2).transpose(1, 2)
        if self._class is not None:
            x = torch.cat((self._class.expand(x.size(0), 1, -1), x), dim=1)
        return x + self._positions


class ViTLayer:
    """Pre-norm layer with bidirectional attention within each picture."""

    def __init__(self, name: str, config: ViTConfig, place: LayerPlacement) -> None:
        size, eps = config.hidden_size, config.norm_eps
        inputs = [Projection(f"{name}.self_attn.{part}_proj", size) for part in ("q", "k", "v")]
        self._heads = config.num_heads
        self._first_norm = LayerNorm(f"{name}.layer_norm1", size, eps, place)
        self._input = Linear(inputs, size, True, place, quantized=False)
        self._output = Linear([Projection(f"{name}.self_attn.out_proj", size)], size, True, place, quantized=False)
        self._second_norm = LayerNorm(f"{name}.layer_norm2", size, eps, place)
        up, down = Projection(f"{name}.mlp.fc1", config.intermediate_size), Projection(f"{name}.mlp.fc2", size)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)
        self._attend = place.ops.ragged_attention

    @property
    def _parts(self) -> tuple[LayerNorm, Linear, Linear, LayerNorm, PlainMLP]:
        return self._first_norm, self._input, self._output, self._second_norm, self._mlp

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, starts: Tensor, length: int) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape.

        `starts`: int32 [num_pictures + 1]; picture i has the tokens from starts[i] to starts[i + 1] (exclusive),
        `length` each.
        """
        qkv = self._input(self._first_norm(x)).view(x.size(0), 3, self._heads, -1)
        q, k, v = qkv.unbind(1)
        attended = self._attend(q, k, v, starts, length, q.size(-1) ** -0.5, 0)
        x = x + self._output(attended.flatten(1))
        return x + self._mlp(self._second_norm(x))
