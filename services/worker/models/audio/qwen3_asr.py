"""Encoder of Qwen3-ASR: convolutions over chunks of one second, layers whose attention spans some chunks, and a
projector of two layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.audio.whisper_encoder import WhisperEncoderLayer, read_whisper_encoder
from quire.shared.errors import InvalidArgument
from quire.shared.media.families.qwen3_asr import num_rows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
    from quire.services.worker.models.audio.whisper_encoder import WhisperEncoderConfig
    from quire.services.worker.models.vision.port import MediaInput

TOWER, PROJECTOR = "audio_tower", "multi_modal_projector"
MAX_TIMESCALE = 10_000.0  # of the sinusoidal positions
MAX_CHUNKS = 64  # convolved at once, so that the memory of activations is bounded


@dataclass(frozen=True, slots=True)
class Qwen3ASRSizes:
    """Sizes of the encoder."""

    layers: WhisperEncoderConfig
    channels: int  # of the convolutions
    chunk_frames: int  # frames that the convolutions see at once
    window_chunks: int  # chunks that the layers' attention spans


def read_qwen3_asr(audio: ConfigFile) -> Qwen3ASRSizes:
    """Reads audio_config. Raises InvalidArgument."""
    values = {
        **{"num_mel_bins": 128, "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16},
        **{"encoder_ffn_dim": 4096},
        **audio.values,
    }
    window, inferred = audio.integer("n_window", 50), audio.integer("n_window_infer", 800)
    channels = audio.integer("downsample_hidden_size", 480)
    if not 1 <= window <= 1 << 12 or not 2 * window <= inferred <= 1 << 20:
        raise refusal("n_window", window, f"1 to 4096 is needed, and n_window_infer, {inferred}, of at least twice it")
    if not 1 <= channels <= 1 << 16:
        raise refusal("downsample_hidden_size", channels, "must be from 1 to 65536")
    return Qwen3ASRSizes(read_whisper_encoder(ConfigFile(values)), channels, 2 * window, inferred // (2 * window))


class Qwen3ASREncoder:
    """MediaEncoder of the family."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: Qwen3ASRSizes, text_size: int, place: LayerPlacement) -> None:
        """Builds the encoder without weights; names are those of Whisper's layers."""
        self._sizes, config, channels = sizes, sizes.layers, sizes.channels
        size = config.hidden_size
        self._convolutions = tuple(
            (place.empty(channels, inputs, 3, 3), place.empty(channels)) for inputs in (1, channels, channels)
        )
        self._flatten = Linear(
            [Projection(f"{TOWER}.conv_out", size)], channels * num_rows(config.bins, 1 << 30), False, place
        )
        self._layers = [
            WhisperEncoderLayer(f"{TOWER}.layers.{index}", config, place, has_key_bias=True)
            for index in range(config.num_layers)
        ]
        self._norm = LayerNorm(f"{TOWER}.ln_post", size, 1e-5, place)
        first, second = Projection(f"{PROJECTOR}.linear_1", size), Projection(f"{PROJECTOR}.linear_2", text_size)
        self._projector = PlainMLP(first, second, size, True, place, activation=config.activation)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (self._flatten, *self._layers, self._norm, self._projector)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for number, (weight, bias) in enumerate(self._convolutions, 1):
            yield f"{TOWER}.conv2d{number}.weight", weight
            yield f"{TOWER}.conv2d{number}.bias", bias
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of clips, [num_rows, text_size] each. Raises InvalidArgument for features that are no whole
        number of chunks, or frames that they do not have."""
        return [self(item.pixels, _frames(item, self._sizes)) for item in items]

    def __call__(self, features: Tensor, frames: int) -> Tensor:
        """Computes rows of a clip: features [1, bins, chunks * chunk_frames], of which the first `frames` are sound ->
        [num_rows, text_size]."""
        import torch

        sizes = self._sizes
        x = self._convolved(features)[: num_rows(frames, sizes.chunk_frames)]
        window = sizes.window_chunks * num_rows(sizes.chunk_frames, sizes.chunk_frames)
        ends = [*range(0, x.size(0), window), x.size(0)]
        starts = torch.tensor(ends, dtype=torch.int32, device=x.device)
        for layer in self._layers:
            x = layer(x, starts, min(window, x.size(0)))
        return self._projector(self._norm(x))

    def _convolved(self, features: Tensor) -> Tensor:
        """Returns the hidden states of all chunks with their positions, which begin anew in each, [num_rows,
        hidden_size]."""
        import torch

        chunks = features[0].unflatten(1, (-1, self._sizes.chunk_frames)).transpose(0, 1).unsqueeze(1)
        found = [self._convolved_chunks(some) for some in chunks.split(MAX_CHUNKS)]
        return torch.cat(found).flatten(0, 1)

    def _convolved_chunks(self, x: Tensor) -> Tensor:
        """Convolves chunks: [num_chunks, 1, bins, frames] -> [num_chunks, rows, hidden_size]."""
        from torch.nn import functional

        x = x.to(self._convolutions[0][0].dtype)
        for weight, bias in self._convolutions:
            x = functional.gelu(functional.conv2d(x, weight, bias, stride=2, padding=1))
        count, rows = x.size(0), x.size(3)
        flat = self._flatten(x.permute(0, 3, 1, 2).reshape(count * rows, -1).contiguous())
        return flat.view(count, rows, -1) + _sinusoids(rows, flat)


def _frames(item: MediaInput, sizes: Qwen3ASRSizes) -> int:
    """Returns the number of frames of a clip that are sound. Raises InvalidArgument."""
    shape, count = list(item.pixels.shape), item.layout[0] if item.layout else 0
    fits = shape[:2] == [1, sizes.layers.bins] and shape[2] % sizes.chunk_frames == 0 and 1 <= count <= shape[2]
    if not fits:
        text = (
            f"media: features {shape} with {count} frames of sound, and the encoder needs [1, {sizes.layers.bins}, a "
            f"multiple of {sizes.chunk_frames}]"
        )
        raise InvalidArgument(text, field="media")
    return count


def _sinusoids(rows: int, like: Tensor) -> Tensor:
    """Returns sinusoidal positions [rows, hidden_size], sines before cosines."""
    import math

    import torch

    half = like.size(-1) // 2
    rates = torch.exp(-math.log(MAX_TIMESCALE) / (half - 1) * torch.arange(half, device=like.device).float())
    angles = torch.arange(rows, device=like.device).float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)
