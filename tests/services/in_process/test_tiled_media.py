"""Scheduler and worker together answer questions about pictures that are cut into tiles as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.media.registry import read_media_processor
from tests.services.in_process.test_media_families import answers, engine_of
from tests.services.worker.media.tiled_families import (
    FAMILIES,
    SIZES,
    Question,
    answer_of_transformers,
    asked,
    inputs_of,
    saved,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_shared_prefixes_and_pictures_of_many_sizes(family: str, tmp_path: Path) -> None:
    """Later prompts begin like earlier ones and continue with other pictures; steps end inside of pictures."""
    model = saved(family, tmp_path)
    processor = read_media_processor(tmp_path)
    assert processor is not None
    earlier = [SIZES[:2], SIZES[2:], []]
    later = [[*SIZES[:2], SIZES[3]], [SIZES[0]], [SIZES[2], SIZES[2]]]
    prompts = [asked(processor, sizes) for sizes in earlier + later]

    def expected(question: Question, sizes: list[tuple[int, int]]) -> list[int]:
        inputs = inputs_of(family, processor, question, sizes) if sizes else {}
        return answer_of_transformers(model, question.tokens, inputs)

    wanted = [expected(*pair) for pair in zip(prompts, earlier + later, strict=True)]
    engine = engine_of(tmp_path, prompts, encoder_cache_size=512)
    count = len(earlier)
    assert answers(engine, prompts[:count], 0) == wanted[:count]
    assert answers(engine, prompts[count:], count) == wanted[count:]
