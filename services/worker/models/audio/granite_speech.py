"""Encoder of Granite Speech (arXiv 2505.08699): a conformer, and a projector of queries (Q-Former,
arXiv 2301.12597)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN, activate
from quire.services.worker.models.audio.conformer import Conformer, ConformerSizes
from quire.services.worker.models.audio.named_tensors import NamedTensors, linear_shapes, norm_shapes
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput

log = logger("worker.build")

TOWER, PROJECTOR = "model.encoder", "model.projector"
SELF, CROSS = "attention", "crossattention"
MAX_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class QFormerSizes:
    """Sizes of the projector."""

    window: int  # positions of the conformer that become `num_queries` rows
    num_queries: int
    hidden_size: int
    encoder_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    cross_frequency: int  # of the layers with cross attention, from the first
    eps: float
    activation: str


def read_granite_speech(config: ConfigFile) -> tuple[ConformerSizes, QFormerSizes]:
    """Reads encoder_config and projector_config. Raises InvalidArgument for sizes that do not fit together."""
    encoder = config.section("encoder_config") or ConfigFile({})
    projector = config.section("projector_config") or ConfigFile({})
    hidden, heads = _size(encoder, "hidden_dim", 1024), _size(encoder, "num_heads", 8)
    conformer = ConformerSizes(
        input_dim=_size(encoder, "input_dim", 160),
        num_layers=_size(encoder, "num_layers", 10),
        hidden_dim=hidden,
        feed_forward=hidden * _size(encoder, "feedforward_mult", 4),
        num_heads=heads,
        head_dim=_size(encoder, "dim_head", hidden // heads or 1),
        output_dim=_size(encoder, "output_dim", 42),
        context_size=_size(encoder, "context_size", 200),
        max_distance=_size(encoder, "max_pos_emb", 512),
        kernel_size=_size(encoder, "conv_kernel_size", 15),
        inner_dim=hidden * _size(encoder, "conv_expansion_factor", 2),
    )
    if conformer.context_size > conformer.max_distance:
        raise refusal("context_size", conformer.context_size, f"at most max_pos_emb, {conformer.max_distance}")
    window = _size(config, "window_size", 15)
    qformer = QFormerSizes(
        window=window,
        num_queries=window // _size(config, "downsample_rate", 5),
        hidden_size=_size(projector, "hidden_size", 768),
        encoder_size=_size(projector, "encoder_hidden_size", 1408),
        intermediate_size=_size(projector, "intermediate_size", 3072),
        num_layers=_size(projector, "num_hidden_layers", 12),
        num_heads=_size(projector, "num_attention_heads", 12),
        cross_frequency=_size(projector, "cross_attention_frequency", 2),
        eps=projector.number("layer_norm_eps", 1e-12),
        activation=projector.text("hidden_act", "gelu"),
    )
    if qformer.encoder_size != hidden or qformer.hidden_size % qformer.num_heads or not qformer.num_queries:
        text = f"it must be hidden_dim, {hidden}, and heads and queries must divide the width and the window"
        raise refusal("projector_config.encoder_hidden_size", qformer.encoder_size, text)
    if qformer.activation not in KNOWN:
        raise refusal("projector_config.hidden_act", qformer.activation, f"supported: {', '.join(KNOWN)}")
    if config.flag("has_lora_adapter", True):
        log.warning(
            "the model's adapter for sound is not applied by itself: start with --lora NAME=FOLDER, and request the "
            "model NAME for prompts with sound"
        )
    return conformer, qformer


def _size(config: ConfigFile, name: str, default: int) -> int:
    """Returns a size. Raises InvalidArgument for one out of bounds."""
    found = config.integer(name, default)
    if not 1 <= found <= MAX_SIZE:
        raise refusal(name, found, f"must be from 1 to {MAX_SIZE}")
    return found


class GraniteSpeechEncoder:
    """MediaEncoder of the family."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: tuple[ConformerSizes, QFormerSizes], text_size: int, place: LayerPlacement) -> None:
        self._sizes, qformer = sizes[0], sizes[1]
        self._tower = Conformer(TOWER, sizes[0], place)
        self._projector = QFormer(PROJECTOR, qformer, text_size, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        yield from self._projector.tensors.destinations()

    def finish(self) -> None:
        """Does nothing: the tensors are used as they are."""

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of clips, [num_rows, text_size] each. Raises InvalidArgument for features that are not one
        clip."""
        width = self._sizes.input_dim
        for item in items:
            shape = list(item.pixels.shape)
            if len(shape) != 3 or shape[0] != 1 or shape[1] < 1 or shape[2] != width:
                text = f"media: features {shape}, and the encoder needs [1, pairs of frames, {width}]"
                raise InvalidArgument(text, field="media")
        return [self(item.pixels[0]) for item in items]

    def __call__(self, features: Tensor) -> Tensor:
        """Computes rows: [pairs of frames, input_dim] -> [num_rows, text_size]."""
        return self._projector(self._tower(features.to(self._projector.tensors["query"].dtype)))


class QFormer:
    """Learned queries that attend to each other and to one window of hidden states each time."""

    def __init__(self, name: str, sizes: QFormerSizes, text_size: int, place: LayerPlacement) -> None:
        self._sizes, self._activate = sizes, activate(sizes.activation, place)
        self.tensors = NamedTensors(name, _qformer_shapes(sizes, text_size), place)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Computes rows: [length, encoder_size] -> [windows * num_queries, text_size]; zeros fill the last window."""
        from torch.nn import functional

        sizes = self._sizes
        padded = functional.pad(hidden, (0, 0, 0, -hidden.size(0) % sizes.window))
        windows = padded.view(-1, sizes.window, hidden.size(1))
        x = self.tensors.normed("qformer.layernorm", self.tensors["query"], sizes.eps).expand(windows.size(0), -1, -1)
        for index in range(sizes.num_layers):
            name = f"qformer.encoder.layer.{index}"
            x = self._attended(f"{name}.{SELF}", x, x)
            if index % sizes.cross_frequency == 0:
                x = self._attended(f"{name}.{CROSS}", x, windows)
            up = self._activate(self.tensors.linear(f"{name}.intermediate_query.dense", x))
            down = self.tensors.linear(f"{name}.output_query.dense", up)
            x = self.tensors.normed(f"{name}.output_query.LayerNorm", down + x, sizes.eps)
        return self.tensors.linear("linear", x.flatten(0, 1))

    def _attended(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        """Returns the norm of x and of its attention to `seen`, [windows, queries, hidden_size]."""
        from torch.nn import functional

        heads = self._sizes.num_heads
        q, k, v = (
            self.tensors.linear(f"{name}.attention.{part}", source).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, source in (("query", x), ("key", seen), ("value", seen))
        )
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        update = self.tensors.linear(f"{name}.output.dense", attended)
        return self.tensors.normed(f"{name}.output.LayerNorm", update + x, self._sizes.eps)


def _qformer_shapes(sizes: QFormerSizes, text_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the projector's tensors by name."""
    size = sizes.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"query": (1, sizes.num_queries, size)}
    shapes |= norm_shapes("qformer.layernorm", size) | linear_shapes("linear", text_size, size)
    for index in range(sizes.num_layers):
        name = f"qformer.encoder.layer.{index}"
        kinds = {SELF: size} | ({CROSS: sizes.encoder_size} if index % sizes.cross_frequency == 0 else {})
        for kind, seen in kinds.items():
            shapes |= linear_shapes(f"{name}.{kind}.attention.query", size, size)
            shapes |= linear_shapes(f"{name}.{kind}.attention.key", size, seen)
            shapes |= linear_shapes(f"{name}.{kind}.attention.value", size, seen)
            shapes |= linear_shapes(f"{name}.{kind}.output.dense", size, size)
            shapes |= norm_shapes(f"{name}.{kind}.output.LayerNorm", size)
        shapes |= linear_shapes(f"{name}.intermediate_query.dense", sizes.intermediate_size, size)
        shapes |= linear_shapes(f"{name}.output_query.dense", size, sizes.intermediate_size)
        shapes |= norm_shapes(f"{name}.output_query.LayerNorm", size)
    return shapes
