"""The vision part of Llama 4: a ViT with rotary positions by column and row, joined patches, and an adapter of two
linear layers before the projector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import activate
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.models.vision.tiles import encode_tiles, join_neighbours
from quire.services.worker.models.vision.vit import ViT, ViTConfig, ViTNames
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

TOWER, ADAPTER, PROJECTOR = "vision_model", "vision_model.vision_adapter.mlp", "multi_modal_projector.linear_1"
LLAMA4_VISION = "llama4_vision_model"
NORM_EPS, GELU = 1e-5, "gelu"  # of transformers' class, which reads no such fields
NAMES = ViTNames(
    patches="patch_embedding.linear",
    class_token="class_embedding",
    positions="positional_embedding_vlm",
    first_norm="layernorm_pre",
    last_norm="layernorm_post",
    layers="model.layers",
    attention_output="o_proj",
    layer_norms=("input_layernorm", "post_attention_layernorm"),
)


@dataclass(frozen=True, slots=True)
class Llama4VisionConfig:
    """Configuration of tower, adapter and projector, read from config.json."""

    tower: ViTConfig
    text_size: int  # width of the text model's embeddings
    joined: int  # patches on a side of the square that becomes one row
    adapter_size: int  # between the adapter's layers
    output_size: int  # of the adapter


def read_llama4(config: ConfigFile, vision: ConfigFile, text_size: int) -> Llama4VisionConfig:
    """Reads config.json and its vision section.

    `text_size`: width of the text model's embeddings. Raises InvalidArgument for other towers, and for sizes that do
    not fit together.
    """
    kind = vision.text("model_type", LLAMA4_VISION)
    if kind != LLAMA4_VISION:
        text = f"config.json: vision_config.model_type is {kind!r}; {LLAMA4_VISION} is supported"
        raise InvalidArgument(text, field="model")
    rope = vision.section("rope_parameters") or ConfigFile({})
    tower = ViTConfig(
        hidden_size=vision.integer("hidden_size", 768),
        intermediate_size=vision.integer("intermediate_size", 5632),
        num_layers=vision.integer("num_hidden_layers", 34),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 14),
        image_size=vision.integer("image_size", 448),
        norm_eps=NORM_EPS,
        activation=GELU,
        has_class_token=True,
        has_patch_bias=False,
        has_first_norm=True,
        has_last_norm=True,
        has_flat_patches=True,
        class_token_is_last=True,
        rope_theta=rope.number("rope_theta", vision.number("rope_theta", 10_000.0)),
        names=NAMES,
    )
    ratio, sizes = vision.number("pixel_shuffle_ratio", 0.5), _adapter_sizes(vision)
    joined = round(1 / ratio) if ratio > 0 else 0
    if joined < 1 or joined * ratio != 1 or tower.patches_per_side % joined:
        text = f"its inverse must be a whole number that divides the {tower.patches_per_side} patches on a side"
        raise refusal("vision_config.pixel_shuffle_ratio", ratio, text)
    if tower.hidden_size * joined**2 != tower.intermediate_size:
        size = tower.hidden_size
        text = f"{size * joined**2} is needed: the adapter joins {joined**2} patches of {size}"
        raise refusal("vision_config.intermediate_size", tower.intermediate_size, text)
    return Llama4VisionConfig(tower, text_size, joined, *sizes)


def _adapter_sizes(vision: ConfigFile) -> tuple[int, int]:
    """Returns the output widths of the adapter's two layers. Raises InvalidArgument unless they and vision_output_dim
    are equal, as the shapes in checkpoints require."""
    inner, outer = vision.integer("projector_input_dim", 4096), vision.integer("projector_output_dim", 4096)
    output = vision.integer("vision_output_dim", 7680)
    if inner != outer or outer != output:
        text = f"projector_input_dim is {inner}, projector_output_dim {outer}; all three must be equal"
        raise refusal("vision_config.vision_output_dim", output, text)
    return inner, outer


class Llama4Vision:
    """Vision tower, adapter and projector that turn tiles into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Llama4VisionConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        width = config.tower.hidden_size * config.joined**2
        first = Projection(f"{ADAPTER}.fc1", config.adapter_size)
        second = Projection(f"{ADAPTER}.fc2", config.output_size)
        self._tower = ViT(TOWER, config.tower, place)
        self._adapter = PlainMLP(first, second, width, False, place, activation=GELU)
        self._activate = activate(GELU, place)
        self._projector = Linear([Projection(PROJECTOR, config.text_size)], config.output_size, False, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in (self._tower, self._adapter, self._projector):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._tower, self._adapter, self._projector):
            part.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each picture, [num_embeddings, text_size]: those of its tiles, in order."""
        return [rows.flatten(0, 1) for rows in encode_tiles(items, self, self._normalization, self._dtype)]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Computes the rows of tiles: normalized pixels [num_tiles, 3, side, side] -> [num_tiles, rows of a tile,
        text_size]."""
        joined = join_neighbours(self._tower(pixels), self.config.joined)
        adapted = self._activate(self._adapter(joined.flatten(0, 1)))
        return self._projector(adapted).view(*joined.shape[:2], -1)
