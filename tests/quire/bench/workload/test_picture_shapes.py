"""Shapes of models that take pictures have everything that a server needs to serve pictures with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire.bench.workload import shapes
from quire.bench.workload.picture_shapes import IMAGE_PAD, VISION_END, VISION_START
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.media.registry import read_media_processor
from tests.spec_decode.pair import build

SMALL: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 128},
    },
    "qwen3-vl-8b": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
SMALL_TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64}


@pytest.mark.parametrize(("name", "num_tokens"), [("qwen2.5-vl-7b", 26 * 46), ("qwen3-vl-8b", 22 * 40)])
def test_a_shape_has_a_processor_and_a_template(name: str, num_tokens: int, tmp_path: Path) -> None:
    shape = shapes.prepare(name, tmp_path)
    assert shape.folder is not None
    assert shape.vocab_size in (152_064, 151_936)
    processor = read_media_processor(shape.folder)
    assert processor is not None
    frames, rows, columns = processor.layout(720, 1280, {}).numbers
    assert (frames, rows * columns) == (1, num_tokens)
    template = jinja2.Template((shape.folder / "chat_template.jinja").read_text())
    content = [{"type": "image"}, {"type": "text", "text": "w7 w8"}]
    shown = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(shape.folder / "tokenizer.json"))
    assert tokenizer.encode(shown).ids == [3, VISION_START, IMAGE_PAD, VISION_END, 7, 8, 4]


@pytest.mark.parametrize("name", SMALL)
def test_random_weights_encode_pictures_to_finite_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked with a small model of the same family."""
    config = shapes.CONFIGS[name]
    tower = {**config["vision_config"], **SMALL_TOWER}
    if "deepstack_visual_indexes" in tower:
        tower["deepstack_visual_indexes"] = [0, 1]
    text = {"text_config": {**config["text_config"], **SMALL[name]}} if "text_config" in config else SMALL[name]
    monkeypatch.setitem(shapes.CONFIGS, name, {**config, **text, "vision_config": tower})
    shape = shapes.prepare(name, tmp_path)
    assert shape.folder is not None
    replica = build(None, shape.folder, load_format="dummy", max_model_len=512)
    processor = read_media_processor(shape.folder)
    assert processor is not None
    layout = processor.layout(300, 200, {})
    pixels = np.random.default_rng(0).integers(0, 256, (1, layout.height, layout.width, 3), dtype=np.uint8)
    count = layout.numbers[1] * layout.numbers[2]
    with torch.inference_mode():
        batch = replica.media.encode([FetchedItem(bytes(32), count, layout.numbers, pixels)])
    assert batch.errors == (None,)
    assert replica.media.num_rows == count
