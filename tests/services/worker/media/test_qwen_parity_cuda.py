"""Answers of Qwen-VL models about pictures on CUDA are those of transformers. Run on a GPU machine: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.worker.media.qwen_pictures import (
    NUM_TOKENS,
    QWENS,
    answer,
    assert_equal_logits,
    compute,
    encode,
    greedy,
    make_qwen,
    noise,
    prompt_of,
    read,
)
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import WAYS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", QWENS)
def test_pictures_in_chunks_and_text(name: str, way: str, tmp_path: Path) -> None:
    model = make_qwen(tmp_path, name)
    processor = read(tmp_path)
    prompts = [
        prompt_of(processor, noise(16, 40), 3, noise(40, 24), 1, noise(8, 8), 19),
        prompt_of(processor, 13),
        prompt_of(processor, 4, noise(30, 61), 2),
    ]
    rig = Rig(tmp_path, device="cuda", **WAYS[way])
    encode(rig, *prompts)
    for slot, prompt in enumerate(prompts):
        compute(rig, slot, prompt, 7)
    for slot, prompt in enumerate(prompts):
        assert answer(rig, slot) == greedy(model, prompt, NUM_TOKENS), slot
        assert_equal_logits(rig, slot, model, prompt)
