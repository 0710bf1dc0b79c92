"""Encoders on a GPU compute what those on the CPU do, with the head sizes of published towers. Run on a GPU machine:
pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.services.worker.layers.placement import LayerPlacement
from tests.services.worker.models.vision.test_tiled_families import FAMILIES, LLAMA4_ADAPTER, SIDE
from tests.services.worker.models.vision.towers import opened, random_item, saved

pytestmark = pytest.mark.gpu

# InternViT, SigLIP and Llama 4; float32 sums are in another order
HEAD_SIZES = [64, 72, 88]
MAX_ERROR = {torch.float32: 2e-3, torch.bfloat16: 8e-2}


@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_cpu(family: str, head_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    found, size = FAMILIES[family], 2 * head_size
    wider = {**LLAMA4_ADAPTER, "intermediate_size": 4 * size} if family == "llama4" else {}
    folder = saved(found.make({"hidden_size": size, "num_attention_heads": 2, **wider}), tmp_path)
    place = LayerPlacement(kernels.load("cuda"), dtype, torch.device("cuda"))
    items = [random_item(num_tiles, SIDE) for num_tiles in (1, 5)]
    on_gpu = [item._replace(pixels=item.pixels.cuda()) for item in items]
    wanted = opened(folder, found.read, found.encoder).encode(items)
    with torch.inference_mode():
        rows = opened(folder, found.read, found.encoder, place).encode(on_gpu)
    for computed, expected in zip(rows, wanted, strict=True):
        scale = expected.abs().max()
        assert (computed.float().cpu() - expected).abs().max() < MAX_ERROR[dtype] * scale
