"""Pixtral (arXiv 2410.07073) and Mistral 3: a vision transformer for pictures of any size, with rotary positions by row
and column, and a projector that may join squares of patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import MLP, PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.vision.normalization import normalize
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
LIGHTON_OCR = "lighton_ocr"  # Mistral 3's vision part by other names
LIGHTON_TOWER, LIGHTON_PROJECTOR = "vision_encoder", "vision_projection"
MODEL_TYPE = "pixtral"
NORM_EPS = 1e-5  # of the tower, in every release
ROPE_THETA = 1e4


@dataclass(frozen=True, slots=True)
class PixtralConfig:
    """Configuration of the tower and the projector, read from config.json."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are run
    num_heads: int
    patch_size: int  # pixels on a side
    activation: str
    rope_theta: float
    text_size: int  # width of the text model's embeddings
    projector_activation: str
    projector_bias: bool
    merge: int  # patches on a side of the squares that the projector joins; 0: no norm, and nothing is joined
    projector_norm_eps: float
    tower: str = TOWER  # names in checkpoints
    projector: str = PROJECTOR


def read_pixtral(config: ConfigFile, vision: ConfigFile, text_size: int) -> PixtralConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for other towers, several feature layers,
    a layer out of range, and a selection of features that drops a class token, which the tower does not have.
    """
    kind, depth = vision.text("model_type"), vision.integer("num_hidden_layers", 24)
    if kind != MODEL_TYPE:
        text = f"config.json: vision_config.model_type is {kind!r}; {MODEL_TYPE} is supported"
        raise InvalidArgument(text, field="model")
    joins = config.text("model_type") in ("mistral3", LIGHTON_OCR)
    names = (LIGHTON_TOWER, LIGHTON_PROJECTOR) if config.text("model_type") == LIGHTON_OCR else (TOWER, PROJECTOR)
    layer = config.get("vision_feature_layer", -1 if joins else -2)
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise InvalidArgument(
            f"config.json: vision_feature_layer is {layer!r}; one of {depth} layers is needed, {-depth - 1} to {depth}",
            field="model",
        )
    strategy = "full" if joins else config.text("vision_feature_select_strategy", "default")
    if strategy != "full":
        raise InvalidArgument(
            f"config.json: vision_feature_select_strategy is {strategy!r}; a pixtral tower has no class token to drop, "
            "so it has to be 'full'",
            field="model",
        )
    rope, text_config = vision.section("rope_parameters"), config.section("text_config")
    return PixtralConfig(
        hidden_size=vision.integer("hidden_size", 1024),
        intermediate_size=vision.integer("intermediate_size", 4096),
        num_layers=layer % (depth + 1),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 16),
        activation=vision.text("hidden_act", "gelu"),
        rope_theta=(rope or vision).number("rope_theta", ROPE_THETA),
        text_size=text_size,
        projector_activation=config.text("projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", not joins),
        merge=config.integer("spatial_merge_size", 2) if joins else 0,
        projector_norm_eps=(text_config or config).number("rms_norm_eps", 1e-6),
        tower=names[0],
        projector=names[1],
    )


class PixtralVision:
    """Vision tower and projector that turn pictures into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PixtralConfig, place: LayerPlacement, normalization: Normalization) -> None:
        size = config.hidden_size
        self.config = config
        self._normalization, self._place = normalization, place
        self._tower = PixtralTower(config.tower, config, place)
        self._merger = PatchMerger(f"{config.projector}.", config, place) if config.merge else None
        self._projector = PlainMLP(
            Projection(f"{config.projector}.linear_1", config.text_size),
            Projection(f"{config.projector}.linear_2", config.text_size),
            size,
            config.projector_bias,
            place,
            activation=config.projector_activation,
        )

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()
        if self._merger is not None:
            yield from self._merger.destinations()
        yield from self._projector.destinations()

    def finish(self) -> None:
        self._tower.finish()
        if self._merger is not None:
            self._merger.finish()
        self._projector.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]. Each picture is one tile, whose sides are
        multiples of a token's pixels."""
        import torch

        patch = self.config.patch_size
        grids = [(item.pixels.size(1) // patch, item.pixels.size(2) // patch) for item in items]
        pixels = [normalize(item.pixels, self._normalization, self._place.dtype) for item in items]
        features = self._tower(pixels, grids)
        lengths = [height * width for height, width in grids]
        if self._merger is not None:
            joined = [self._merger(*each) for each in zip(features.split(lengths), grids, strict=True)]
            features, lengths = torch.cat(joined), [len(each) for each in joined]
        return list(self._projector(features).split(lengths))


class PixtralTower:
    """Vision transformer; patches of all pictures are one batch, and attend within their picture."""

    def __init__(self, name: str, config: PixtralConfig, place: LayerPlacement) -> None:
        size, patch = config.hidden_size, config.patch_size
        self._config, self._name = config, name
        self._patches: Tensor = place.empty(size, 3, patch, patch)
        self._norm = RMSNorm(f"{name}.ln_pre", size, NORM_EPS, place)
        layers = range(config.num_layers)
        self._layers = [PixtralLayer(f"{name}.transformer.layers.{index}", config, place) for index in layers]

    @property
    def passed_over(self) -> tuple[str, ...]:
        return ()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.patch_conv.weight", self._patches
        yield from self._norm.destinations()
        for layer in self._layers:
            yield from layer.destinations()

    def finish(self) -> None:
        self._norm.finish()
        for layer in self._layers:
            layer.finish()

    def __call__(self, pictures: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> Tensor:
        """Computes hidden states [num_patches of all pictures, hidden_size], picture after picture, row after row.

        `pictures`: normalized pixels [1, 3, height, width] of each, in the tower's dtype; `grids`: patches by height
        and width of each.
        """
        import torch
        from torch.nn import functional

        size = self._config.patch_size
        patches = [functional.conv2d(pixels, self._patches, stride=size).flatten(2)[0].t() for pixels in pictures]
        x = self._norm(torch.cat(patches).contiguous())
        lengths = torch.tensor([0, *(height * width for height, width in grids)], dtype=torch.int32)
        longest, starts = int(lengths.max()), lengths.cumsum(0, dtype=torch.int32).to(x.device)
        angles = self._angles(grids).to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self._layers:
            x = layer(x, cos, sin, starts, longest)
        return x

    def _angles(self, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the angle of each patch and pair of a head's elements, float32 [num_patches, 1, head_dim / 2]: the
        even frequencies turn by the row, then the odd ones by the column."""
        import torch

        dim = self._config.hidden_size // self._config.num_heads
        frequencies = self._config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim)
        angles = []
        for height, width in grids:
            rows = torch.arange(height).repeat_interleave(width)
            columns = torch.arange(width).repeat(height)
            angles.append(torch.cat((rows[:, None] * frequencies[0::2], columns[:, None] * frequencies[1::2]), dim=1))
        return torch.cat(angles).unsqueeze(1)


class PixtralLayer:
    """Pre-norm layer: attention in both directions within each picture, and a gated feed-forward layer."""

    def __init__(self, name: str, config: PixtralConfig, place: LayerPlacement) -> None:
        size = config.hidden_size
        inputs = [Projection(f"{name}.attention.{part}_proj", size) for part in ("q", "k", "v")]
        self._heads = config.num_heads
        self._first_norm = RMSNorm(f"{name}.attention_norm", size, NORM_EPS, place)
        self._input = Linear(inputs, size, False, place, quantized=False)
        output = Projection(f"{name}.attention.o_proj", size)
        self._output = Linear([output], size, False, place, quantized=False)
        self._second_norm = RMSNorm(f"{name}.ffn_norm", size, NORM_EPS, place)
        feed_forward = f"{name}.feed_forward"
        self._mlp = MLP(feed_forward, size, config.intermediate_size, False, place, activation=config.activation)
        self._attend = place.ops.ragged_attention

    @property
    def _parts(self) -> tuple[RMSNorm, Linear, Linear, RMSNorm, MLP]:
        return self._first_norm, self._input, self._output, self._second_norm, self._mlp

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Runs the layer: x [num_patches, hidden_size] -> the same shape.

        `cos`, `sin`: [num_patches, 1, head_dim / 2]; `starts`: int32 [num_pictures + 1], the first patch of each
        picture; `longest`: patches of the largest one.
        """
        qkv = self._input(self._first_norm(x)).view(x.size(0), 3, self._heads, -1)
        q, k, v = qkv.unbind(1)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = self._attend(q, k, v.contiguous(), starts, longest, q.size(-1) ** -0.5, 0)
        x = x + self._output(attended.flatten(1))
        return x + self._mlp(self._second_norm(x))


class PatchMerger:
    """Normalizes the tower's output, and joins each square of patches into one row with a linear layer."""

    def __init__(self, prefix: str, config: PixtralConfig, place: LayerPlacement) -> None:
        size = config.hidden_size
        self._merge = config.merge
        self._norm = RMSNorm(f"{prefix}norm", size, config.projector_norm_eps, place)
        output = Projection(f"{prefix}patch_merger.merging_layer", size)
        self._linear = Linear([output], size * config.merge**2, False, place, quantized=False)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._norm.destinations()
        yield from self._linear.destinations()

    def finish(self) -> None:
        self._norm.finish()
        self._linear.finish()

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Joins the patches of one picture: x [height * width, hidden_size] -> [number of squares, hidden_size].
        `grid`: its patches by height and width; the last ones that fill no square are left out."""
        merge = self._merge
        height, width = (size // merge * merge for size in grid)
        patches = self._norm(x).view(*grid, -1)[:height, :width]
        squares = patches.reshape(height // merge, merge, width // merge, merge, -1)
        joined = squares.permute(0, 2, 4, 1, 3)  # features are outermost in a row, then the square's rows
        return self._linear(joined.reshape(-1, joined.size(2) * merge**2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates element i of a head with element i + head_dim / 2 as a pair: x [num_patches, num_heads, head_dim] -> the
    same shape."""
    import torch

    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
