"""Answers of Qwen-VL models about pictures are those of transformers, however a prompt is cut, shared or batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.worker.media.qwen_pictures import (
    QWENS,
    Prompt,
    greedy,
    logits,
    make_qwen,
    noise,
    prompt_of,
    read,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

NUM_TOKENS = 6
MAX_ERROR = 2e-4
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


def encode(rig: Rig, *prompts: Prompt) -> None:
    """Encodes the prompts' pictures, all in one call."""
    items = {item.identifier: item for prompt in prompts for item in prompt.fetched}
    with torch.inference_mode():
        batch = rig.replica.media.encode([*items.values()])
    batch.wait()
    assert batch.errors == (None,) * len(items), batch.errors


def answer(rig: Rig, slot: int, count: int = NUM_TOKENS) -> list[int]:
    """Decodes until the slot has `count` tokens of output."""
    row = rig.scheduler.rows[slot]
    while len(row.tokens) < row.num_prompt + count:
        rig.step()
    return row.tokens[row.num_prompt :][:count]


def compute(rig: Rig, slot: int, prompt: Prompt, chunk: int) -> None:
    """Admits a prompt and computes it in chunks."""
    rig.step([New(slot, prompt.tokens, media=prompt.items)], {slot: min(chunk, len(prompt.tokens))})
    while (left := len(prompt.tokens) - rig.scheduler.rows[slot].num_computed) > 0:
        rig.step(counts={slot: min(chunk, left)})


def assert_equal_logits(rig: Rig, slot: int, model: Any, prompt: Prompt) -> None:
    rows = torch.stack(rig.logits[slot])
    expected = logits(model, prompt, rig.tokens(slot))[len(prompt.tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(expected)], expected, atol=MAX_ERROR, rtol=MAX_ERROR)


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
