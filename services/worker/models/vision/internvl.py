"""InternVL 3 (arXiv 2504.10479): InternViT on tiles, joined patches, and a projector of two linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.vision.tiles import encode_tiles, join_neighbours
from quire.services.worker.models.vision.vit import ViT, ViTConfig, ViTNames
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
INTERNVIT = "internvl_vision"
NORM_EPS = 1e-5  # of the projector's norm
NAMES = ViTNames(
    patches="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    last_norm="layernorm",
    layers="encoder.layer",
    attention="attention",
    attention_output="projection_layer",
    layer_norms=("layernorm_before", "layernorm_after"),
    batch_dims=1,
)


@dataclass(frozen=True, slots=True)
class InternVLVisionConfig:
    """Configuration of InternViT and its projector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings
    joined: int  # patches on a side of the square that becomes one row
    projector_activation: str


def read_internvl(config: ConfigFile, vision: ConfigFile, text_size: int) -> InternVLVisionConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for other towers than InternViT,
    unsupported selections of features, and a downsample_ratio that does not divide the patches on a side.
    """
    layer, strategy = config.get("vision_feature_layer", -1), config.text("vision_feature_select_strategy", "default")
    if not isinstance(layer, int):
        raise refusal("vision_feature_layer", layer, "one layer is supported")
    if strategy != "default":
        raise refusal("vision_feature_select_strategy", strategy, "'default' is supported")
    tower, ratio = _read_tower(vision, layer), config.number("downsample_ratio", 0.5)
    joined = round(1 / ratio) if ratio > 0 else 0
    if joined < 1 or joined * ratio != 1 or tower.patches_per_side % joined:
        text = f"its inverse must be a whole number that divides the {tower.patches_per_side} patches on a side"
        raise refusal("downsample_ratio", ratio, text)
    return InternVLVisionConfig(tower, text_size, joined, config.text("projector_hidden_act", "gelu"))


def _read_tower(vision: ConfigFile, layer: int) -> ViTConfig:
    """Reads `vision_config`. `layer`: the hidden state that is used: 0 is the input of the first layer, -1 the output
    of the last. Raises InvalidArgument for other towers, and for fields that are not supported."""
    kind = vision.text("model_type", INTERNVIT)
    if kind != INTERNVIT:
        raise InvalidArgument(
            f"config.json: vision_config.model_type is {kind!r}; {INTERNVIT} is supported", field="model"
        )
    depth = vision.integer("num_hidden_layers", 24)
    if not -depth - 1 <= layer <= depth:
        text = f"config.json: vision_feature_layer is {layer}, of {depth} layers; {-depth - 1} to {depth} is needed"
        raise InvalidArgument(text, field="model")
    if not vision.flag("use_absolute_position_embeddings", True):
        raise refusal("vision_config.use_absolute_position_embeddings", False, "true is supported")
    norm = vision.text("norm_type", "layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        raise refusal("vision_config.norm_type", norm, "'layer_norm' or 'rms_norm' is needed")
    return ViTConfig(
        hidden_size=vision.integer("hidden_size", 1024),
        intermediate_size=vision.integer("intermediate_size", 4096),
        num_layers=layer % (depth + 1),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=_side(vision, "patch_size", 14),
        image_size=_side(vision, "image_size", 448),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        activation=vision.text("hidden_act", "gelu"),
        has_class_token=True,
        has_patch_bias=True,
        has_last_norm=layer == -1 and not vision.flag("use_mean_pooling", True),
        has_attention_bias=vision.flag("attention_bias", False),
        has_query_key_norm=vision.flag("use_qk_norm", False),
        has_rms_norm=norm == "rms_norm",
        has_layer_scale=True,
        names=NAMES,
    )


def _side(vision: ConfigFile, key: str, default: int) -> int:
    """Reads the side of a square, in pixels, which is given as a number or as two equal ones. Raises InvalidArgument
    for others."""
    value = vision.get(key, default)
    sides = value if isinstance(value, list) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise refusal(f"vision_config.{key}", value, "a whole number, or two equal ones, is needed")
    return sides[0]


class InternVLVision:
    """InternViT and projector that turn tiles into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = (f"{TOWER}.layernorm.", f"{TOWER}.embeddings.mask_token")

    def __init__(self, config: InternVLVisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        width = config.tower.hidden_size * config.joined**2
        first, second = (Projection(f"{PROJECTOR}.linear_{i}", config.text_size) for i in (1, 2))
        self._tower = ViT(TOWER, config.tower, place)
        self._norm = LayerNorm(f"{PROJECTOR}.layer_norm", width, NORM_EPS, place)
        self._projector = PlainMLP(first, second, width, True, place, activation=config.projector_activation)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in (self._tower, self._norm, self._projector):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._tower, self._norm, self._projector):
            part.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]: those of its tiles, in order."""
        return [rows.flatten(0, 1) for rows in encode_tiles(items, self, self._normalization, self._dtype)]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the rows of tiles: normalized pixels [num_tiles, 3, side, side] -> [num_tiles, rows of a tile,
        text_size]."""
        joined = join_neighbours(self._tower(pixels), self.config.joined)
        return self._projector(self._norm(joined.flatten(0, 1))).view(*joined.shape[:2], -1)
