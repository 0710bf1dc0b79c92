"""Answers about pictures that are cut into tiles are those of transformers, from the picture to the last token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.shared.media.registry import read_media_processor
from tests.services.worker.media.families import NUM_TOKENS
from tests.services.worker.media.tiled_families import FAMILIES, SIZES, answer_of_transformers, asked, inputs_of, saved
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig


@pytest.mark.parametrize("chunk", [1000, 13])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, chunk: int, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    processor = read_media_processor(tmp_path)
    assert processor is not None
    question = asked(processor, SIZES)
    rig = Rig(tmp_path, num_blocks=512)
    with torch.inference_mode():
        batch = rig.replica.media.encode(question.items)
    batch.wait()
    assert batch.errors == (None,) * len(SIZES)
    count = min(chunk, len(question.tokens))
    rig.step([New(0, question.tokens, media=question.media)], {0: count})
    while (left := len(question.tokens) - rig.scheduler.rows[0].num_computed) > 0:
        rig.step(counts={0: min(chunk, left)})
    while len(rig.tokens(0)) < len(question.tokens) + NUM_TOKENS:
        rig.step()
    expected = answer_of_transformers(model, question.tokens, inputs_of(family, processor, question, SIZES))
    assert rig.tokens(0)[len(question.tokens) :][:NUM_TOKENS] == expected
