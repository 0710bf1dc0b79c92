"""Encoder of Whisper (arXiv 2212.04356): convolutions over a log-mel spectrogram, then pre-norm layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN, activate
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.config.size_bounds import HEADS, LAYERS, POSITIONS, WIDTH, check_sizes
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput

EPS = 1e-5
STRIDE = 2  # frames of the spectrogram for each row
KERNEL = 3  # frames that a convolution sees
MOST_CLIPS = 8  # computed together: bounds the memory of one call
BOUNDS = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDTH,
    "num_mel_bins": WIDTH,
    "max_source_positions": POSITIONS,
}


@dataclass(frozen=True, slots=True)
class WhisperEncoderConfig:
    """Sizes of the encoder, read from config.json."""

    num_mel_bins: int
    num_positions: int  # rows of one clip
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str

    @property
    def num_frames(self) -> int:
        """Frames of the spectrogram of one clip; shorter ones are padded before."""
        return STRIDE * self.num_positions


def read_whisper_encoder(config: ConfigFile) -> WhisperEncoderConfig:
    """Reads config.json. Raises InvalidArgument for sizes out of range, and for heads that do not divide the width."""
    check_sizes(config.values, BOUNDS)
    size, heads = config.integer("d_model"), config.integer("encoder_attention_heads")
    if size % heads:
        raise refusal("encoder_attention_heads", heads, f"must divide d_model, {size}")
    activation = config.text("activation_function", "gelu")
    if activation not in KNOWN:
        raise refusal("activation_function", activation, f"supported: {', '.join(KNOWN)}")
    return WhisperEncoderConfig(
        config.integer("num_mel_bins", 80),
        config.integer("max_source_positions", 1500),
        size,
        config.integer("encoder_layers"),
        heads,
        config.integer("encoder_ffn_dim"),
        activation,
    )


class WhisperEncoderLayer:
    """Pre-norm layer with bidirectional attention within each clip."""

    def __init__(self, name: str, config: WhisperEncoderConfig, place: LayerPlacement) -> None:
        size, attention = config.hidden_size, f"{name}.self_attn"
        inputs = [Projection(f"{attention}.{part}_proj", size, has_bias=part != "k") for part in "qkv"]
        up, down = Projection(f"{name}.fc1", config.intermediate_size), Projection(f"{name}.fc2", size)
        self._heads, self._attend = config.num_heads, place.ops.ragged_attention
        self._first_norm = LayerNorm(f"{name}.self_attn_layer_norm", size, EPS, place)
        self._input = Linear(inputs, size, True, place, quantized=False)
        self._output = Linear([Projection(f"{attention}.out_proj", size)], size, True, place, quantized=False)
        self._second_norm = LayerNorm(f"{name}.final_layer_norm", size, EPS, place)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)
        self.parts = (self._first_norm, self._input, self._output, self._second_norm, self._mlp)

    def __call__(self, x: Tensor, starts: Tensor, length: int) -> Tensor:
        """Runs the layer: x [num_rows, hidden_size] -> the same shape. `starts`: int32 [num_clips + 1], the first row
        of each clip, all of `length` rows."""
        q, k, v = (part.view(x.size(0), self._heads, -1) for part in self._input(self._first_norm(x)).chunk(3, dim=-1))
        attended = self._attend(q, k, v, starts, length, q.size(-1) ** -0.5, 0, None)
        x = x + self._output(attended.flatten(1))
        return x + self._mlp(self._second_norm(x))


class WhisperEncoder:
    """MediaEncoder of log-mel spectrograms: a row for every two frames."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: WhisperEncoderConfig, place: LayerPlacement, name: str = "model.encoder") -> None:
        """Builds the encoder without weights. `name`: of the module in the checkpoint."""
        size = config.hidden_size
        self.config, self._dtype = config, place.dtype
        self._activate = activate(config.activation, place)
        self._convolutions = [
            (place.empty(size, num_inputs, KERNEL), place.empty(size)) for num_inputs in (config.num_mel_bins, size)
        ]
        self._positions = place.empty(config.num_positions, size)
        self._layers = [WhisperEncoderLayer(f"{name}.layers.{i}", config, place) for i in range(config.num_layers)]
        self._norm = LayerNorm(f"{name}.layer_norm", size, EPS, place)
        self._name = name

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for number, (weight, bias) in enumerate(self._convolutions, 1):
            yield f"{self._name}.conv{number}.weight", weight
            yield f"{self._name}.conv{number}.bias", bias
        yield f"{self._name}.embed_positions.weight", self._positions
        for layer in self._layers:
            for part in layer.parts:
                yield from part.destinations()
        yield from self._norm.destinations()

    def finish(self) -> None:
        for layer in self._layers:
            for part in layer.parts:
                part.finish()
        self._norm.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of clips, [num_positions, hidden_size] each. Raises InvalidArgument for features that are
        not one clip of the model's size."""
        import torch

        bins, frames = self.config.num_mel_bins, self.config.num_frames
        rows: list[Tensor] = []
        for item in items:
            shape = list(item.pixels.shape)
            if [size for size in shape if size != 1] != [size for size in (bins, frames) if size != 1]:
                text = f"media: features {shape}, and the model needs [1, {bins}, {frames}]: pad or cut the sound"
                raise InvalidArgument(text, field="media")
        for first in range(0, len(items), MOST_CLIPS):
            clips = [item.pixels.reshape(bins, frames) for item in items[first : first + MOST_CLIPS]]
            rows += self(torch.stack(clips).to(self._dtype)).unbind(0)
        return rows

    def __call__(self, features: Tensor) -> Tensor:
        """Computes hidden states: features [num_clips, num_mel_bins, num_frames] -> [num_clips, num_positions,
        hidden_size]."""
        import torch
        from torch.nn import functional

        x = features
        for (weight, bias), stride in zip(self._convolutions, (1, STRIDE), strict=True):
            x = self._activate(functional.conv1d(x, weight, bias, stride=stride, padding=1))
        x = x.transpose(1, 2) + self._positions
        num_clips, length, size = x.shape
        starts = torch.arange(num_clips + 1, dtype=torch.int32, device=x.device) * length
        x = x.reshape(num_clips * length, size)
        for layer in self._layers:
            x = layer(x, starts, length)
        normed: Tensor = self._norm(x).view(num_clips, length, size)
        return normed
