"""The vision tower (SigLIP's vision transformer) and LLaVA's projector in plain torch, for training.

As in the text network, weights are float32 and are rounded to the dtype of the activations where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.pictures.recipe import MEAN, STD, TowerShape

LAYER_NAMES: dict[str, str] = {
    "norm1": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Parts of a layer, by their names here and in Hugging Face's SigLIP; each has a weight and a bias."""

TOWER, PROJECTOR = "vision_tower.vision_model", "multi_modal_projector"


class Affine(NamedTuple):
    """Weight [outputs, inputs] or [size] and bias."""

    weight: Tensor
    bias: Tensor


class TowerLayerWeights(NamedTuple):
    """Weights of one layer."""

    norm1: Affine
    q: Affine
    k: Affine
    v: Affine
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


def affine(x: Tensor, part: Affine) -> Tensor:
    """Computes the affine map in x's dtype."""
    return F.linear(x, part.weight.to(x.dtype), part.bias.to(x.dtype))


def layer_norm(x: Tensor, part: Affine, eps: float) -> Tensor:
    """Layer norm over the last dimension, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], part.weight, part.bias, eps).to(x.dtype)


def tower_layer(x: Tensor, weights: TowerLayerWeights, num_heads: int, eps: float) -> Tensor:
    """Pre-norm layer with bidirectional attention: x [num_pictures, num_patches, hidden_size] -> the same shape."""
    normed = layer_norm(x, weights.norm1, eps)
    q, k, v = (
        affine(normed, part).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for part in (weights.q, weights.k, weights.v)
    )
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + affine(attended, weights.out)
    normed = layer_norm(x, weights.norm2, eps)
    return x + affine(F.gelu(affine(normed, weights.up), approximate="tanh"), weights.down)


class TrainedTower(nn.Module):
    """Vision tower and projector: pixels to rows of text embeddings."""

    def __init__(self, shape: TowerShape, text_size: int, layer: Callable[..., Tensor] = tower_layer) -> None:
        super().__init__()
        self.shape, self._layer = shape, layer
        size = shape.hidden_size
        pixels = 3 * shape.patch_size**2
        self.patch, self.patch_bias = nn.Parameter(_matrix(size, pixels)), nn.Parameter(torch.zeros(size))
        self.position_embedding = nn.Parameter(torch.randn(shape.num_patches, size) * 0.02)
        self.layers = nn.ModuleList(_layer_parameters(shape) for _ in range(shape.num_hidden_layers))
        self.projector1, self.projector1_bias = (
            nn.Parameter(_matrix(text_size, size)),
            nn.Parameter(torch.zeros(text_size)),
        )
        self.projector2 = nn.Parameter(_matrix(text_size, text_size) * 0.65)  # rows about as large as embeddings
        self.projector2_bias = nn.Parameter(torch.zeros(text_size))

    def forward(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns embeddings [num_pictures, num_patches, text_size] of 8-bit pixels [num_pictures, side, side, 3]."""
        return self.project(self.features(pixels, dtype))

    def features(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the output of the last layer, [num_pictures, num_patches, hidden_size]."""
        x = self._patches(((pixels.float() / 255 - MEAN) / STD).to(dtype))
        x = affine(x, Affine(self.patch, self.patch_bias)) + self.position_embedding.to(dtype)
        for index in range(len(self.layers)):
            x = self._layer(x, self._weights(index), self.shape.num_attention_heads, self.shape.layer_norm_eps)
        return x

    def project(self, features: Tensor) -> Tensor:
        """Returns the embeddings of features: [..., hidden_size] -> [..., text_size]."""
        x = F.gelu(affine(features, Affine(self.projector1, self.projector1_bias)))
        return affine(x, Affine(self.projector2, self.projector2_bias))

    def _patches(self, pixels: Tensor) -> Tensor:
        """Cuts [num_pictures, side, side, 3] into patches [num_pictures, num_patches, 3 * patch_size**2], with
        channels, rows and columns in the order of a convolution's weight."""
        patch = self.shape.patch_size
        cut = pixels.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))  # [n, rows, patch, columns, patch, 3]
        return cut.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)

    def _weights(self, index: int) -> TowerLayerWeights:
        stored = self.layers[index]
        assert isinstance(stored, nn.ParameterDict)
        return TowerLayerWeights(*(Affine(stored[name], stored[f"{name}_bias"]) for name in LAYER_NAMES))

    def tensors(self) -> dict[str, Tensor]:
        """Returns all weights under their names in a LLaVA checkpoint, with the unused norm after the last layer,
        which transformers expects to be there."""
        size, patch = self.shape.hidden_size, self.shape.patch_size
        found = {
            f"{TOWER}.embeddings.patch_embedding.weight": self.patch.view(size, 3, patch, patch),
            f"{TOWER}.embeddings.patch_embedding.bias": self.patch_bias,
            f"{TOWER}.embeddings.position_embedding.weight": self.position_embedding,
            f"{TOWER}.post_layernorm.weight": torch.ones(size),
            f"{TOWER}.post_layernorm.bias": torch.zeros(size),
            f"{PROJECTOR}.linear_1.weight": self.projector1,
            f"{PROJECTOR}.linear_1.bias": self.projector1_bias,
            f"{PROJECTOR}.linear_2.weight": self.projector2,
            f"{PROJECTOR}.linear_2.bias": self.projector2_bias,
        }
        for index in range(len(self.layers)):
            for name, part in self._weights(index)._asdict().items():
                prefix = f"{TOWER}.encoder.layers.{index}.{LAYER_NAMES[name]}"
                found |= {f"{prefix}.weight": part.weight, f"{prefix}.bias": part.bias}
        return found

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies the weights of a checkpoint into the tower."""
        for name, weight in self.tensors().items():
            weight.copy_(tensors[name])


def _layer_parameters(shape: TowerShape) -> nn.ParameterDict:
    """Returns the weights of a new layer, which passes its input through."""
    size, ffn = shape.hidden_size, shape.intermediate_size
    weights = {
        "norm1": torch.ones(size),
        "q": _matrix(size, size),
        "k": _matrix(size, size),
        "v": _matrix(size, size),
        "out": torch.zeros(size, size),
        "norm2": torch.ones(size),
        "up": _matrix(ffn, size),
        "down": torch.zeros(size, ffn),
    }
    biases = {f"{name}_bias": torch.zeros(len(weight)) for name, weight in weights.items()}
    return nn.ParameterDict(weights | biases)


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * columns**-0.5
