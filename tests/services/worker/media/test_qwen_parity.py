"""Answers of Qwen-VL models about pictures are those of transformers, however a prompt is cut, shared or batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.graphs.test_chunk_graphs import chunk_rig
from tests.services.worker.graphs.test_decode_graphs import graph_rig
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
    with_published_names,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Saved = tuple[Path, Any]
SIZES = [(16, 40), (40, 24), (8, 8), (30, 61), (64, 9)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Checkpoints by name, each made once."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, make_qwen(folder, name)
        return made[name]

    return get


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", QWENS)
def test_a_picture_of_any_size(qwen: Callable[[str], Saved], name: str, size: tuple[int, int]) -> None:
    folder, model = qwen(name)
    prompt, rig = prompt_of(read(folder), 5, noise(*size), 4), Rig(folder)
    encode(rig, prompt)
    compute(rig, 0, prompt, len(prompt.tokens))
    assert answer(rig, 0) == greedy(model, prompt, NUM_TOKENS)
    assert_equal_logits(rig, 0, model, prompt)


@pytest.mark.parametrize("chunk", [3, 7, 1000])
@pytest.mark.parametrize("name", QWENS)
def test_several_pictures_in_chunks(qwen: Callable[[str], Saved], name: str, chunk: int) -> None:
    folder, model = qwen(name)
    pictures = [noise(*size) for size in SIZES[:3]]
    prompt = prompt_of(read(folder), pictures[0], 3, pictures[1], 1, pictures[2], 5)
    rig = Rig(folder)
    encode(rig, prompt)
    compute(rig, 0, prompt, chunk)
    assert answer(rig, 0) == greedy(model, prompt, NUM_TOKENS)
    assert_equal_logits(rig, 0, model, prompt)


@pytest.mark.parametrize("name", QWENS)
def test_a_batch_with_and_without_pictures(qwen: Callable[[str], Saved], name: str) -> None:
    folder, model = qwen(name)
    processor = read(folder)
    prompts = [
        prompt_of(processor, 4, noise(24, 32), 6),
        prompt_of(processor, 13),
        prompt_of(processor, 2, noise(40, 8), 1, noise(24, 32), 3),
    ]
    rig = Rig(folder)
    encode(rig, *prompts)
    new = [New(slot, prompt.tokens, media=prompt.items) for slot, prompt in enumerate(prompts)]
    rig.step(new, {0: 9, 1: 13, 2: 11})
    rig.step(counts={slot: len(prompts[slot].tokens) - first for slot, first in ((0, 9), (2, 11))})
    for slot, prompt in enumerate(prompts):
        assert answer(rig, slot) == greedy(model, prompt, NUM_TOKENS), slot
        assert_equal_logits(rig, slot, model, prompt)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_a_prefix_hit_may_end_inside_of_a_picture_or_after_it(qwen: Callable[[str], Saved], name: str) -> None:
    folder, model = qwen(name)
    processor, picture = read(folder), noise(32, 40)  # 4 x 5 tokens
    first, rig = prompt_of(processor, 6, picture, 5), Rig(folder)
    encode(rig, first)
    compute(rig, 0, first, 1000)
    assert answer(rig, 0) == greedy(model, first, NUM_TOKENS)
    for slot, blocks in ((1, 4), (2, 7)):  # 16 and 28 of 31 tokens
        later = prompt_of(processor, 6, picture, 9)
        rig.step(
            [New(slot, later.tokens, cached_blocks=rig.blocks(0)[:blocks], media=later.items)],
            {slot: len(later.tokens) - 4 * blocks},
        )
        assert answer(rig, slot) == greedy(model, later, NUM_TOKENS), slot
        assert_equal_logits(rig, slot, model, later)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_a_sequence_is_resubmitted_with_its_output(qwen: Callable[[str], Saved], name: str) -> None:
    """A preempted sequence computes its prompt and its output again."""
    folder, model = qwen(name)
    prompt, rig = prompt_of(read(folder), 3, noise(24, 32), 3), Rig(folder)
    encode(rig, prompt)
    compute(rig, 0, prompt, 1000)
    expected = greedy(model, prompt, 3 + NUM_TOKENS)
    so_far = answer(rig, 0, 3)
    assert so_far == expected[:3]
    again = New(1, prompt.tokens + so_far, num_prompt=len(prompt.tokens), media=prompt.items)
    rig.step([again], {1: len(prompt.tokens) + 3}, released=[0])
    assert answer(rig, 1, 3 + NUM_TOKENS) == expected


def test_text_after_a_slot_had_pictures_is_rotated_plainly(qwen: Callable[[str], Saved]) -> None:
    folder, model = qwen("qwen2.5")
    processor = read(folder)
    pictured, text = prompt_of(processor, 3, noise(24, 32), 3), prompt_of(processor, 11)
    rig = Rig(folder)
    encode(rig, pictured)
    compute(rig, 0, pictured, 1000)
    answer(rig, 0)
    rig.logits.clear()
    rig.step([New(0, text.tokens)], {0: 11}, released=[0])
    assert answer(rig, 0) == greedy(model, text, NUM_TOKENS)
    assert_equal_logits(rig, 0, model, text)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@torch.inference_mode()
def test_recorded_decodes_rotate_by_the_positions_after_pictures(qwen: Callable[[str], Saved], name: str) -> None:
    """Rows with pictures, whose positions are shifted, and without decode in one recording."""
    folder, model = qwen(name)
    processor = read(folder)
    prompts = [
        prompt_of(processor, 2, noise(24, 32), 3),
        prompt_of(processor, 9),
        prompt_of(processor, noise(8, 40), 4),
    ]
    rig, _ = graph_rig(Checkpoint(folder, model))
    encode(rig, *prompts)
    for slot, prompt in enumerate(prompts):
        compute(rig, slot, prompt, 1000)
    for slot, prompt in enumerate(prompts):
        assert answer(rig, slot) == greedy(model, prompt, NUM_TOKENS), slot


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@torch.inference_mode()
def test_recorded_chunks_after_a_picture_rotate_by_shifted_positions(qwen: Callable[[str], Saved], name: str) -> None:
    folder, model = qwen(name)
    prompt = prompt_of(read(folder), 2, noise(24, 32), 11)
    rig, seen = chunk_rig(Checkpoint(folder, model))
    encode(rig, prompt)
    rig.step([New(0, prompt.tokens, media=prompt.items)], {0: 15})  # all of the picture
    recorded = seen.num_forwards
    rig.step(counts={0: 6})
    rig.step(counts={0: 4})
    assert seen.num_forwards == recorded + 2
    assert answer(rig, 0) == greedy(model, prompt, NUM_TOKENS)


@pytest.mark.parametrize("name", ["qwen2", "qwen2.5", "qwen3", "qwen3-moe"])
def test_published_files(qwen: Callable[[str], Saved], name: str, tmp_path: Path) -> None:
    """Qwen2-VL and Qwen2.5-VL have flat configurations and "visual" beside "model"; Qwen3-VL has both in "model"."""
    folder, model = qwen(name)
    with_published_names(folder, tmp_path, is_flat=not name.startswith("qwen3"))
    prompt, rig = prompt_of(read(tmp_path), 5, noise(24, 32), 4), Rig(tmp_path)
    encode(rig, prompt)
    compute(rig, 0, prompt, 1000)
    assert answer(rig, 0) == greedy(model, prompt, NUM_TOKENS)
    assert_equal_logits(rig, 0, model, prompt)
