"""Towers of transformers, loaded by our loader from files with the names of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.vision.transformers_vision import make_transformers_vision
from quire.shared.errors import InvalidArgument
from tests.services.worker.checkpoints import SHAPE
from tests.services.worker.media.families import SIDE, cohere2_vision, got_ocr2, vipllava
from tests.services.worker.models.vision.towers import NORMALIZATION, random_item, read_sections, saved

MODELS: dict[str, Callable[[], Any]] = {"cohere2": cohere2_vision, "got-ocr2": got_ocr2, "vipllava": vipllava}
WIDTH = SHAPE["hidden_size"]


def old_names(name: str) -> str:
    """Returns the name of a tensor in files of transformers 4."""
    for new, old in (
        ("model.vision_tower.embeddings.", "vision_tower.vision_model.embeddings."),
        ("model.vision_tower.encoder.", "vision_tower.vision_model.encoder."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.language_model.", "language_model.model."),
    ):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def placed(device: str = "cpu") -> LayerPlacement:
    return LayerPlacement(kernels.load("cpu"), torch.float32, torch.device(device))


@pytest.mark.parametrize("rename", [str, old_names])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(name: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    folder = saved(model, tmp_path, rename)
    encoder = make_transformers_vision(*read_sections(folder), WIDTH, placed(), NORMALIZATION)
    Loader("auto", 0).load(encoder, folder, is_on_other_stage=lambda _: True)
    items = [random_item(tiles, SIDE) for tiles in (1, 3)]
    with torch.inference_mode():
        rows = encoder.encode(items)
        for item, found in zip(items, rows, strict=True):
            mean, std = (torch.tensor(values) for values in NORMALIZATION[:2])
            pixels = ((item.pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)
            wanted = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
            torch.testing.assert_close(found, wanted.reshape(-1, WIDTH), atol=1e-5, rtol=1e-4)


def test_no_memory_is_needed_to_size_one(tmp_path: Path) -> None:
    folder = saved(cohere2_vision(), tmp_path)
    encoder = make_transformers_vision(*read_sections(folder), WIDTH, placed("meta"), NORMALIZATION)
    assert {destination.device.type for _, destination in encoder.destinations()} == {"meta"}


def test_a_configuration_that_transformers_refuses_is_refused(tmp_path: Path) -> None:
    config, vision = read_sections(saved(cohere2_vision(), tmp_path))
    config.values["vision_config"]["num_attention_heads"] = 5
    with pytest.raises(InvalidArgument, match=r"config\.json: transformers does not make its encoder: "):
        make_transformers_vision(config, vision, WIDTH, placed(), NORMALIZATION)


def test_another_text_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"hidden_size is {WIDTH} for pictures, and 8 for text"):
        make_transformers_vision(*read_sections(saved(cohere2_vision(), tmp_path)), 8, placed(), NORMALIZATION)
