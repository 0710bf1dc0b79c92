"""Encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: reading of their configurations, and cutting of pictures
into patches for the tower in qwen_vit.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.size_bounds import VISION_BOUNDS, check_sizes
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.patch_grid import PatchGrid
from quire.services.worker.models.vision.qwen_vit import MergerNames, QwenViT, QwenViTConfig

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

EARLIER_MERGER = MergerNames("ln_q", "mlp.0", "mlp.2")


def read_qwen_vit(kind: str, vision: ConfigFile, text_size: int) -> QwenViTConfig:
    """Reads a `vision_config`. `kind`: model_type of the whole model, a key of READERS. Raises InvalidArgument for
    sizes that do not fit `text_size`, the width of the text model's embeddings, or each other."""
    check_sizes(vision.values, VISION_BOUNDS)
    config = READERS[kind](vision)
    if config.out_size != text_size:
        field = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
        raise refusal(f"vision_config.{field}", config.out_size, f"the text model has {text_size}; they must be equal")
    if config.hidden_size % (4 * config.num_heads):
        text = f"heads can be rotated only if 4 * num_heads divides the hidden size, {config.hidden_size}"
        raise refusal("vision_config.num_heads", config.num_heads, text)
    return config


def _read_qwen2(vision: ConfigFile) -> QwenViTConfig:
    """Reads Qwen2-VL's tower, in which `hidden_size` is the width of its output and `embed_dim` its own."""
    size = vision.integer("embed_dim", 1280)
    return QwenViTConfig(
        hidden_size=size,
        intermediate_size=int(size * vision.number("mlp_ratio", 4)),
        num_layers=vision.integer("depth", 32),
        out_size=vision.integer("hidden_size", 3584),
        activation=vision.text("hidden_act", "quick_gelu"),
        mlp=("fc1", "fc2"),
        merger=EARLIER_MERGER,
        **_common(vision, patch_size=14),
    )


def _read_qwen2_5(vision: ConfigFile) -> QwenViTConfig:
    """Reads Qwen2.5-VL's tower: RMSNorm, gates, and windows in most layers."""
    common = _common(vision, patch_size=14)
    window, square = vision.integer("window_size", 112), common["merge_size"] * common["patch_size"]
    if window < square:
        raise refusal(
            "vision_config.window_size",
            window,
            f"a merged square has {square} pixels on a side, the least for a window",
        )
    return QwenViTConfig(
        hidden_size=vision.integer("hidden_size", 3584),
        intermediate_size=vision.integer("intermediate_size", 3420),
        num_layers=vision.integer("depth", 32),
        out_size=vision.integer("out_hidden_size", 3584),
        activation=vision.text("hidden_act", "silu"),
        merger=EARLIER_MERGER,
        has_rms_norm=True,
        window=window // square,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        **common,
    )


def _read_qwen3(vision: ConfigFile) -> QwenViTConfig:
    """Reads Qwen3-VL's tower: learned positions and deepstack."""
    side = int(vision.integer("num_position_embeddings", 2304) ** 0.5)
    return QwenViTConfig(
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_layers=vision.integer("depth", 27),
        out_size=vision.integer("out_hidden_size", 3584),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        mlp=("linear_fc1", "linear_fc2"),
        merger=MergerNames("norm", "linear_fc1", "linear_fc2"),
        has_patch_bias=True,
        position_side=side,
        deepstack=_layers(vision, "deepstack_visual_indexes", (8, 16, 24)),
        **_common(vision, patch_size=16),
    )


READERS = {
    "qwen2_5_vl": _read_qwen2_5,
    "qwen2_vl": _read_qwen2,
    "qwen3_vl": _read_qwen3,
    "qwen3_vl_moe": _read_qwen3,
}


def _common(vision: ConfigFile, *, patch_size: int) -> dict[str, Any]:
    """Reads the fields that all towers have; returns them as keyword arguments of QwenViTConfig. `patch_size`: the
    family's default."""
    rope = vision.section("rope_parameters") or ConfigFile({})
    return {
        "num_heads": vision.integer("num_heads", 16),
        "patch_size": _equal_number(vision, "patch_size", patch_size),
        "frames_per_patch": _equal_number(vision, "temporal_patch_size", 2),
        "merge_size": vision.integer("spatial_merge_size", 2),
        "theta": rope.number("rope_theta", 10_000.0),
    }


def _equal_number(vision: ConfigFile, key: str, default: int) -> int:
    """Reads an integer, which may also be written as a list of equal ones. Raises InvalidArgument for others."""
    value = vision.get(key, default)
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    return ConfigFile({key: value}).integer(key)


def _layers(vision: ConfigFile, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Reads a list of layers' indices. Raises InvalidArgument for anything but a list of integers."""
    value = vision.get(key, default)
    if not isinstance(value, (list, tuple)) or not all(isinstance(layer, int) for layer in value):
        raise refusal(f"vision_config.{key}", value, "a list of layers' indices, such as [7, 15], is needed")
    return tuple(value)


class QwenVision:
    """Vision encoder that cuts pictures into patches and turns these into rows of text embeddings."""

    passed_over: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: QwenViTConfig, place: LayerPlacement, normalization: Normalization) -> None:
        self.config = config
        self._normalization, self._dtype = normalization, place.dtype
        self._tower = QwenViT(config, place)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._tower.destinations()

    def finish(self) -> None:
        self._tower.finish()

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each item, [num_patches / merge_size**2, row_width], in one run of the tower for items
        of any sizes."""
        import torch

        pixels = [normalize(item.pixels, self._normalization, self._dtype) for item in items]
        patches, grids = zip(*map(self._cut, pixels), strict=True)
        rows = self._tower(torch.cat(patches), grids)
        return list(rows.split([grid.num_patches // self.config.unit for grid in grids]))

    def _cut(self, pixels: Tensor) -> tuple[Tensor, PatchGrid]:
        """Cuts the normalized frames of one item, [num_frames, 3, height, width], into patches in merge order (see
        patch_grid.py); returns them, [num_patches, 3 * frames_per_patch * patch_size**2], and their grid. The last
        frame is repeated until the frames fill the patches."""
        import torch

        config = self.config
        patch, merge, depth = config.patch_size, config.merge_size, config.frames_per_patch
        missing = -pixels.size(0) % depth
        if missing:
            pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
        grid = PatchGrid(pixels.size(0) // depth, pixels.size(2) // patch, pixels.size(3) // patch)
        cells = pixels.view(
            grid.frames, depth, 3, grid.rows // merge, merge, patch, grid.columns // merge, merge, patch
        )
        cells = cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return cells.reshape(grid.num_patches, -1), grid
