"""Answers of Qwen-VL models about videos are those of transformers, however a prompt is cut, shared or batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.services.worker.media.qwen_pictures import MAX_ERROR, NUM_TOKENS, answer, noise
from tests.services.worker.media.qwen_videos import Film, VideoPrompt, greedy, logits, make_filming, video_prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Saved = tuple[Path, Any]
NAMES = ["qwen2", "qwen2.5", "qwen3", "qwen3-moe"]
SHORT = Film(4, 24, 40)  # less time than rows or columns


@pytest.fixture(scope="module")
def filming(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Checkpoints by name, each made once."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, make_filming(folder, name)
        return made[name]

    return get


def encode(rig: Rig, *prompts: VideoPrompt) -> None:
    items = {item.identifier: item for prompt in prompts for item in prompt.fetched}
    with torch.inference_mode():
        batch = rig.replica.media.encode([*items.values()])
    batch.wait()
    assert batch.errors == (None,) * len(items), batch.errors


def compute(rig: Rig, slot: int, prompt: VideoPrompt, chunk: int) -> None:
    """Admits a prompt and computes it in chunks."""
    rig.step([New(slot, prompt.tokens, media=prompt.items)], {slot: min(chunk, len(prompt.tokens))})
    while (left := len(prompt.tokens) - rig.scheduler.rows[slot].num_computed) > 0:
        rig.step(counts={slot: min(chunk, left)})


def assert_equal(rig: Rig, slot: int, saved: Saved, prompt: VideoPrompt, *, given: bool) -> None:
    """Compares the next tokens of a slot and their logits with those of transformers."""
    folder, model = saved
    assert answer(rig, slot) == greedy(model, folder, prompt, NUM_TOKENS, given=given)
    rows = torch.stack(rig.logits[slot])
    expected = logits(model, folder, prompt, rig.tokens(slot), given=given)[len(prompt.tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(expected)], expected, atol=MAX_ERROR, rtol=MAX_ERROR)


@pytest.mark.parametrize("name", NAMES)
def test_a_short_video_with_the_positions_of_transformers(filming: Callable[[str], Saved], name: str) -> None:
    saved = filming(name)
    prompt, rig = video_prompt(saved[0], 5, SHORT, 4), Rig(saved[0])
    encode(rig, prompt)
    compute(rig, 0, prompt, 1000)
    assert_equal(rig, 0, saved, prompt, given=False)


@pytest.mark.parametrize(
    "film",
    [
        Film(12, 8, 16),  # more time than rows and columns
        Film(7, 16, 24, 3.0),  # an odd number of frames; 1.33 positions a pair
        Film(1, 24, 24),
        Film(10, 8, 16, 8.0),  # less than a position a pair: transformers#48669
        Film(4, 16, 8, 0.5),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_videos_of_any_length_and_rate(filming: Callable[[str], Saved], name: str, film: Film) -> None:
    saved = filming(name)
    prompt, rig = video_prompt(saved[0], 5, film, 4), Rig(saved[0])
    encode(rig, prompt)
    compute(rig, 0, prompt, 1000)
    assert_equal(rig, 0, saved, prompt, given=name.startswith("qwen2"))


@pytest.mark.parametrize("chunk", [3, 11])
@pytest.mark.parametrize("name", NAMES)
def test_two_videos_and_a_picture_in_chunks(filming: Callable[[str], Saved], name: str, chunk: int) -> None:
    saved = filming(name)
    parts: list[int | Film | Image.Image] = [2, Film(6, 16, 16), 1, noise(24, 32), 3, Film(5, 8, 24, 4.0), 2]
    prompt, rig = video_prompt(saved[0], *parts), Rig(saved[0])
    encode(rig, prompt)
    compute(rig, 0, prompt, chunk)
    assert_equal(rig, 0, saved, prompt, given=name.startswith("qwen2"))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_prefix_hits_end_inside_of_a_video_or_after_it(filming: Callable[[str], Saved], name: str) -> None:
    saved = filming(name)
    film, given = Film(6, 16, 16), name == "qwen2.5"
    first, rig = video_prompt(saved[0], 6, film, 9), Rig(saved[0])
    encode(rig, first)
    compute(rig, 0, first, 1000)
    assert_equal(rig, 0, saved, first, given=given)
    for slot, blocks in ((1, 3), (2, (first.seen[0].item.offset + first.seen[0].item.length + 3) // 4)):
        later = video_prompt(saved[0], 6, film, 13)
        rig.step(
            [New(slot, later.tokens, cached_blocks=rig.blocks(0)[:blocks], media=later.items)],
            {slot: len(later.tokens) - 4 * blocks},
        )
        assert_equal(rig, slot, saved, later, given=given)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_a_batch_with_videos_pictures_and_text(filming: Callable[[str], Saved], name: str) -> None:
    saved = filming(name)
    prompts = [
        video_prompt(saved[0], 4, Film(6, 16, 16), 6),
        video_prompt(saved[0], 13),
        video_prompt(saved[0], 2, noise(24, 32), 3),
    ]
    rig = Rig(saved[0])
    encode(rig, *prompts)
    for slot, prompt in enumerate(prompts):
        compute(rig, slot, prompt, 9)
    for slot, prompt in enumerate(prompts):
        assert_equal(rig, slot, saved, prompt, given=name == "qwen2.5")
