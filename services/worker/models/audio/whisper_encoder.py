"""Whisper's encoder (arXiv 2212.04356): two convolutions over log-mel features, learned or sinusoidal positions that
checkpoints store, and pre-norm layers with bidirectional attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.config.size_bounds import AUDIO_BOUNDS, check_sizes
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement

KERNEL, STRIDE = 3, 2  # of the convolutions, and of the second one
HALF_MARGIN = 1000.0  # below float16's largest number, as in transformers


@dataclass(frozen=True, slots=True)
class WhisperEncoderConfig:
    """Sizes of the encoder."""

    bins: int  # frequency bins of the features
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    activation: str = "gelu"


def read_whisper_encoder(config: ConfigFile) -> WhisperEncoderConfig:
    """Reads an audio_config, with the names of Whisper or of other models of transformers. Raises InvalidArgument for
    sizes out of bounds, heads that do not divide the width, and scaled embeddings."""
    check_sizes(config.values, AUDIO_BOUNDS)

    def size(name: str, other: str, default: int) -> int:
        return config.integer(name if config.has(name) else other, default)

    found = WhisperEncoderConfig(
        bins=config.integer("num_mel_bins", 128),
        hidden_size=size("d_model", "hidden_size", 1280),
        intermediate_size=size("encoder_ffn_dim", "intermediate_size", 5120),
        num_layers=size("encoder_layers", "num_hidden_layers", 32),
        num_heads=size("encoder_attention_heads", "num_attention_heads", 20),
        max_positions=config.integer("max_source_positions", 1500),
        activation=config.text("activation_function", "gelu"),
    )
    if found.hidden_size % found.num_heads:
        text = (
            f"config.json: audio_config has {found.num_heads} heads, which do not divide {found.hidden_size} features"
        )
        raise InvalidArgument(text, field="model")
    if config.flag("scale_embedding"):
        raise InvalidArgument("config.json: audio_config.scale_embedding is true; false is supported", field="model")
    return found


class WhisperEncoder:
    """Computes hidden states of sound from its features."""

    def __init__(
        self, name: str, config: WhisperEncoderConfig, place: LayerPlacement, *, has_norm: bool = True
    ) -> None:
        """Builds the encoder without weights. `has_norm`: a layer norm follows the layers."""
        self.config, self._name = config, name
        size = config.hidden_size
        self._convolutions = tuple(
            (place.empty(size, channels, KERNEL), place.empty(size)) for channels in (config.bins, size)
        )
        self._positions: Tensor = place.empty(config.max_positions, size)
        self._layers = [
            WhisperEncoderLayer(f"{name}.layers.{index}", config, place) for index in range(config.num_layers)
        ]
        self._norm = LayerNorm(f"{name}.layer_norm", size, 1e-5, place) if has_norm else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for number, (weight, bias) in enumerate(self._convolutions, 1):
            yield f"{self._name}.conv{number}.weight", weight
            yield f"{self._name}.conv{number}.bias", bias
        yield f"{self._name}.embed_positions.weight", self._positions
        for layer in self._layers:
            yield from layer.destinations()
        if self._norm is not None:
            yield from self._norm.destinations()

    def finish(self) -> None:
        for layer in self._layers:
            layer.finish()
        if self._norm is not None:
            self._norm.finish()

    def __call__(self, features: Tensor, num_positions: int) -> Tensor:
        """Computes hidden states of the first `num_positions` positions, which see each other and no further one:
        features [num_clips, bins, frames] -> [num_clips, num_positions, hidden_size], the last norm included."""
        hidden = self.without_norm(features, num_positions)
        return hidden if self._norm is None else self.normed(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        """Applies the norm after the layers: [num_clips, num_positions, hidden_size] -> the same shape."""
        assert self._norm is not None
        return self._norm(hidden.reshape(-1, hidden.size(-1))).view(hidden.shape)

    def without_norm(self, features: Tensor, num_positions: int) -> Tensor:
        """Computes hidden states as __call__() does, before the last norm."""
        import torch
        from torch.nn import functional

        (first, first_bias), (second, second_bias) = self._convolutions
        x = functional.gelu(functional.conv1d(features.to(first.dtype), first, first_bias, padding=1))
        x = functional.gelu(functional.conv1d(x, second, second_bias, stride=STRIDE, padding=1))
        x = x.transpose(1, 2)[:, :num_positions] + self._positions[:num_positions]
        num_clips, length, size = x.shape
        starts = torch.arange(num_clips + 1, dtype=torch.int32, device=x.device) * length
        x = x.reshape(num_clips * length, size)
        for layer in self._layers:
            x = layer(x, starts, length)
        return x.view(num_clips, length, size)


class WhisperEncoderLayer:
    """Pre-norm layer with bidirectional attention within each clip. Whisper's keys have no bias."""

    def __init__(
        self, name: str, config: WhisperEncoderConfig, place: LayerPlacement, *, has_key_bias: bool = False
    ) -> None:
        size, attention = config.hidden_size, f"{name}.self_attn"
        self._heads = config.num_heads
        self._first_norm = LayerNorm(f"{name}.self_attn_layer_norm", size, 1e-5, place)
        self._inputs = tuple(
            Linear(
                [Projection(f"{attention}.{part}_proj", size)],
                size,
                has_key_bias or part != "k",
                place,
                quantized=False,
            )
            for part in "qkv"
        )
        self._output = Linear([Projection(f"{attention}.out_proj", size)], size, True, place, quantized=False)
        self._second_norm = LayerNorm(f"{name}.final_layer_norm", size, 1e-5, place)
        up, down = Projection(f"{name}.fc1", config.intermediate_size), Projection(f"{name}.fc2", size)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)
        self._attend = place.ops.ragged_attention

    @property
    def _parts(self) -> tuple[LayerNorm | Linear | PlainMLP, ...]:
        return (self._first_norm, *self._inputs, self._output, self._second_norm, self._mlp)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, starts: Tensor, length: int) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape. Clip i has the tokens from starts[i] to
        starts[i + 1] (exclusive), at most `length` each."""
        normed = self._first_norm(x)
        q, k, v = (project(normed).view(x.size(0), self._heads, -1) for project in self._inputs)
        attended = self._attend(q, k, v, starts, length, q.size(-1) ** -0.5, 0, None)
        x = x + self._output(attended.flatten(1))
        x = x + self._mlp(self._second_norm(x))
        return _within_half(x)


def _within_half(x: Tensor) -> Tensor:
    """Returns hidden states clamped to float16's range, if they are of that type."""
    import torch

    if x.dtype != torch.float16:
        return x
    most = torch.finfo(torch.float16).max - HALF_MARGIN
    return x.clamp(-most, most)
