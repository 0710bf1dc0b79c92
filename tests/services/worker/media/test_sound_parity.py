"""Answers of audio-language models about sound are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.step.fetched_item import FetchedItem
from tests.services.worker.media.sound import (
    LENGTHS,
    MODELS,
    NUM_TOKENS,
    Clip,
    SoundCheckpoint,
    SoundPrompt,
    greedy,
    inputs,
    prompt,
    save,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

MAX_ERROR = 5e-4  # of logits: float32, and features within 2e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SoundCheckpoint]:
    """Checkpoints by name, each made once."""
    made: dict[str, SoundCheckpoint] = {}

    def get(name: str) -> SoundCheckpoint:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def encode(rig: Rig, items: Sequence[FetchedItem]) -> None:
    """Encodes items one after the other, each once."""
    for item in {item.identifier: item for item in items}.values():
        with torch.inference_mode():
            batch = rig.replica.media.encode([item])
        batch.wait()
        assert batch.errors == (None,)


def answer(rig: Rig, slot: int) -> list[int]:
    row = rig.scheduler.rows[slot]
    while len(row.tokens) < row.num_prompt + NUM_TOKENS:
        rig.step()
    return row.tokens[row.num_prompt :][:NUM_TOKENS]


def assert_logits(rig: Rig, slot: int, checkpoint: SoundCheckpoint, asked: SoundPrompt) -> None:
    rows = torch.stack(rig.logits[slot])
    with torch.inference_mode():
        wanted = checkpoint.model(**inputs(checkpoint, rig.tokens(slot), asked.clips)).logits[0].float()
    wanted = wanted[len(asked.tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(wanted)], wanted, atol=MAX_ERROR, rtol=MAX_ERROR)


@pytest.mark.parametrize(("name", "length"), [(name, length) for name in MODELS for length in LENGTHS[name]])
def test_a_clip_of_any_length(saved: Callable[[str], SoundCheckpoint], name: str, length: int) -> None:
    checkpoint = saved(name)
    asked = prompt(checkpoint, 5, Clip(length), 4)
    rig = Rig(checkpoint.folder)
    assert rig.replica.media.modalities == ("audio",)
    encode(rig, asked.items)
    rig.step([New(0, asked.tokens, media=asked.media)], {0: len(asked.tokens)})
    assert answer(rig, 0) == greedy(checkpoint, asked)
    assert_logits(rig, 0, checkpoint, asked)


@pytest.mark.parametrize("name", MODELS)
def test_several_clips_in_one_prompt_in_chunks(saved: Callable[[str], SoundCheckpoint], name: str) -> None:
    checkpoint = saved(name)
    asked = prompt(checkpoint, 5, *(part for length in LENGTHS[name][1:4] for part in (Clip(length), 3)))
    rig = Rig(checkpoint.folder)
    encode(rig, asked.items)
    rig.step([New(0, asked.tokens, media=asked.media)], {0: 7})
    while (left := len(asked.tokens) - rig.scheduler.rows[0].num_computed) > 0:
        rig.step(counts={0: min(11, left)})
    assert answer(rig, 0) == greedy(checkpoint, asked)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_with_and_without_sound_in_one_step(saved: Callable[[str], SoundCheckpoint], name: str) -> None:
    checkpoint = saved(name)
    first, second = map(Clip, LENGTHS[name][1:3])
    prompts = [prompt(checkpoint, 4, first, 2), prompt(checkpoint, 13), prompt(checkpoint, 1, second, first, 1)]
    rig = Rig(checkpoint.folder)
    encode(rig, [item for asked in prompts for item in asked.items])
    new = [New(slot, asked.tokens, media=asked.media) for slot, asked in enumerate(prompts)]
    rig.step(new, {slot: len(asked.tokens) for slot, asked in enumerate(prompts)})
    for slot, asked in enumerate(prompts):
        assert answer(rig, slot) == greedy(checkpoint, asked), slot


@pytest.mark.parametrize("name", MODELS)
def test_clips_of_equal_shape_are_encoded_together(saved: Callable[[str], SoundCheckpoint], name: str) -> None:
    checkpoint = saved(name)
    lengths = (7_000, 7_001, 6_990)
    asked = prompt(checkpoint, 3, *map(Clip, lengths), 2)
    rig = Rig(checkpoint.folder)
    with torch.inference_mode():
        batch = rig.replica.media.encode(asked.items)
    assert batch.errors == (None,) * len(lengths)
    rig.step([New(0, asked.tokens, media=asked.media)], {0: len(asked.tokens)})
    assert answer(rig, 0) == greedy(checkpoint, asked)


@pytest.mark.parametrize("name", MODELS)
def test_the_sound_matters(saved: Callable[[str], SoundCheckpoint], name: str) -> None:
    """Without it, the logits would be others: the comparisons above would fail."""
    checkpoint = saved(name)
    asked = prompt(checkpoint, 5, Clip(7_000), 4)
    silence = [clip * 0 for clip in asked.clips]
    with torch.inference_mode():
        heard = checkpoint.model(**inputs(checkpoint, asked.tokens, asked.clips)).logits[0, -1]
        silent = checkpoint.model(**inputs(checkpoint, asked.tokens, silence)).logits[0, -1]
    assert (heard - silent).abs().max() > 100 * MAX_ERROR


@pytest.mark.parametrize("name", ["qwen2_audio", "voxtral"])
def test_files_of_either_age(saved: Callable[[str], SoundCheckpoint], name: str) -> None:
    """Published files have language_model.model. and language_model.lm_head, as transformers saves them; its modules
    are model.language_model and lm_head."""
    checkpoint = saved(name)
    tensors = load_file(checkpoint.folder / "model.safetensors")
    renamed = {_as_module(written): tensor for written, tensor in tensors.items()}
    assert renamed.keys() == checkpoint.model.state_dict().keys() != tensors.keys()
    asked = prompt(checkpoint, 5, Clip(7_000), 4)
    wanted = greedy(checkpoint, asked)
    save_file(renamed, checkpoint.folder / "model.safetensors", {"format": "pt"})
    try:
        rig = Rig(checkpoint.folder)
        encode(rig, asked.items)
        rig.step([New(0, asked.tokens, media=asked.media)], {0: len(asked.tokens)})
        assert answer(rig, 0) == wanted
    finally:
        save_file(tensors, checkpoint.folder / "model.safetensors", {"format": "pt"})


def _as_module(name: str) -> str:
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    return "model." + name.replace("language_model.model.", "language_model.", 1)
