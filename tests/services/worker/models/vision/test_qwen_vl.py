"""Towers of Qwen2-VL to Qwen3-VL-MoE compute what transformers' do, from files of either age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire import kernels
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.vision.patch_grid import PatchGrid, windows
from quire.services.worker.models.vision.port import MediaInput
from quire.services.worker.models.vision.qwen_vl import QwenVision, read_qwen_vit
from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import CLIP_MEAN, CLIP_STD
from quire.shared.media.processor import Normalization

TEXT_SIZE = 48
TEXT = {
    "hidden_size": TEXT_SIZE, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PATCH = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2VL", {"embed_dim": 32, "hidden_size": TEXT_SIZE, "depth": 3, "num_heads": 2}, {}),
    "qwen2-heads-80": ("Qwen2VL", {"embed_dim": 160, "hidden_size": TEXT_SIZE, "depth": 1, "num_heads": 2}, {}),
    "qwen2.5": (
        "Qwen2_5_VL",
        {
            "hidden_size": 32, "out_hidden_size": TEXT_SIZE, "depth": 4, "num_heads": 2, "intermediate_size": 52,
            "window_size": 16, "fullatt_block_indexes": [1, 3],
        },
        {},
    ),
    "qwen3": (
        "Qwen3VL",
        {
            "hidden_size": 32, "out_hidden_size": TEXT_SIZE, "depth": 4, "num_heads": 2, "intermediate_size": 52,
            "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2],
        },
        {},
    ),
    "qwen3-heads-72": (
        "Qwen3VL",
        {
            "hidden_size": 144, "out_hidden_size": TEXT_SIZE, "depth": 2, "num_heads": 2, "intermediate_size": 52,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [1],
        },
        {},
    ),
    "qwen3-moe": (
        "Qwen3VLMoe",
        {
            "hidden_size": 32, "out_hidden_size": TEXT_SIZE, "depth": 3, "num_heads": 2, "intermediate_size": 52,
            "num_position_embeddings": 49, "deepstack_visual_indexes": [2, 1],
        },
        EXPERTS,
    ),
}  # fmt: skip
SIZES = [(8, 8), (24, 40), (64, 16), (40, 40), (8, 56)]


def made(tower: str) -> Any:
    prefix, vision, text = TOWERS[tower]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config={**PATCH, **vision}, text_config={**TEXT, **text}, image_token_id=99
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms and biases, too
    return model


def saved(model: Any, folder: Path, *, prefix: str) -> Path:
    """Saves the model with this prefix of the tower's tensors."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + _of_tower(name) if "visual." in name else name: held for name, held in tensors.items()}
    assert any(name.startswith(prefix) for name in renamed)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def _of_tower(name: str) -> str:
    return name.removeprefix("model.").removeprefix("visual.")


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> QwenVision:
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    vision = ConfigFile(config).section("vision_config")
    assert vision is not None
    place = LayerPlacement(kernels.load("cpu"), dtype, torch.device("cpu"))
    found = QwenVision(
        read_qwen_vit(config["model_type"], vision, TEXT_SIZE), place, Normalization(CLIP_MEAN, CLIP_STD)
    )
    Loader("auto", 0).load(found, folder, is_on_other_stage=lambda _: True)
    return found


def pictures(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(sizes))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def expected_rows(model: Any, given: list[np.ndarray]) -> list[torch.Tensor]:
    """Computes the rows with transformers: those of embeddings and of deepstack levels side by side."""
    processor = Qwen2VLImageProcessorPil(
        do_resize=False, patch_size=4, merge_size=2, image_mean=CLIP_MEAN, image_std=CLIP_STD
    )
    inputs = processor(given, return_tensors="pt")
    with torch.no_grad():
        found = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    rows = list(found.pooler_output)
    levels = getattr(found, "deepstack_features", None) or []  # by level: rows of all items, or by item
    parts = [level if isinstance(level, tuple) else level.split([len(row) for row in rows]) for level in levels]
    return [torch.cat(both, dim=1) for both in zip(rows, *parts, strict=True)]


@pytest.mark.parametrize("tower", TOWERS)
def test_rows_are_those_of_transformers(tower: str, tmp_path: Path) -> None:
    reference = made(tower)
    ours = opened(saved(reference, tmp_path, prefix="model.visual."))
    for sizes in ([SIZES[0]], SIZES, SIZES[::-1], [SIZES[1]] * 3):
        given = pictures(sizes)
        found = ours.encode([MediaInput(torch.from_numpy(picture)[None]) for picture in given])
        for rows, wanted in zip(found, expected_rows(reference, given), strict=True):
            assert rows.shape == (len(wanted), ours.config.row_width)
            torch.testing.assert_close(rows, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tower", ["qwen2", "qwen2.5", "qwen3"])
def test_published_names_of_the_tower(tower: str, tmp_path: Path) -> None:
    """The first files of Qwen2-VL and Qwen2.5-VL name the tower "visual" at the top."""
    reference = made(tower)
    ours, given = opened(saved(reference, tmp_path, prefix="visual.")), pictures([SIZES[1]])
    (found,) = ours.encode([MediaInput(torch.from_numpy(given[0])[None])])
    torch.testing.assert_close(found, expected_rows(reference, given)[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tower", ["qwen2", "qwen2.5", "qwen3"])
def test_frames_of_a_video_are_those_of_transformers(tower: str, tmp_path: Path) -> None:
    reference = made(tower)
    ours = opened(saved(reference, tmp_path, prefix="model.visual."))
    frames = torch.from_numpy(np.stack(pictures([(24, 40)] * 3)))
    (found,) = ours.encode([MediaInput(frames)])
    (even,) = ours.encode([MediaInput(frames[[0, 1, 2, 2]])])
    assert found.shape[0] == 2 * 3 * 5
    torch.testing.assert_close(found, even, rtol=0, atol=0)
    (first,) = ours.encode([MediaInput(frames[:2])])
    torch.testing.assert_close(found[:15], first, rtol=2e-4, atol=2e-4)  # frames do not see each other


@pytest.mark.parametrize("tower", ["qwen2.5", "qwen3"])
def test_other_pictures_of_a_call_do_not_change_a_picture(tower: str, tmp_path: Path) -> None:
    ours = opened(saved(made(tower), tmp_path, prefix="model.visual."))
    items = [MediaInput(torch.from_numpy(picture)[None]) for picture in pictures(SIZES)]
    together = ours.encode(items)
    for item, rows in zip(items, together, strict=True):
        torch.testing.assert_close(ours.encode([item])[0], rows, rtol=1e-4, atol=1e-4)


def test_windows_are_smaller_at_the_borders() -> None:
    order, counts = windows(PatchGrid(1, 6, 10), 2, 2)  # 3 x 5 squares
    assert counts == [4, 4, 2, 2, 2, 1]
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("tower", "changes", "text"),
    [
        ("qwen2", {"hidden_size": 40}, "vision_config.hidden_size is 40: the text model has 48"),
        ("qwen3", {"out_hidden_size": 40}, "vision_config.out_hidden_size is 40"),
        ("qwen3", {"deepstack_visual_indexes": "8"}, "vision_config.deepstack_visual_indexes is '8'"),
        ("qwen2.5", {"num_heads": 3}, "vision_config.num_heads is 3"),
        ("qwen2.5", {"patch_size": [14, 16]}, "patch_size is"),
        ("qwen2.5", {"window_size": 7}, "vision_config.window_size is 7: a merged square has 8 pixels on a side"),
        ("qwen2", {"depth": 10**9}, "depth is 1000000000: must be from 1 to 4096"),
        ("qwen3", {"num_heads": 0}, "num_heads is 0: must be from 1"),
        ("qwen3", {"hidden_size": -32}, "hidden_size is -32"),
        ("qwen3", {"spatial_merge_size": 0}, "spatial_merge_size is 0"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tower: str, changes: dict[str, Any], text: str) -> None:
    config = made(tower).config.to_dict()
    vision = ConfigFile({**config["vision_config"], **changes})
    with pytest.raises(InvalidArgument, match=text):
        read_qwen_vit(config["model_type"], vision, TEXT_SIZE)
