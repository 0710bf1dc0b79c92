"""Answers about pictures are those of transformers, however a prompt is cut, shared, cached or batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.footprint import footprint
from quire.services.worker.codec.media_codec import decode_item
from quire.services.worker.models.loading.weights import NewWeights
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared.columns import i32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.kv.block_hash import chain_with_media, root_hash, split
from quire.shared.models.model_identity import read_config
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.settings import WorkerSettings
from tests.services.worker.media.pictures import (
    NUM_ROWS,
    PLACEHOLDER,
    encode,
    expected_logits,
    greedy,
    make_llava,
    picture,
    prompt_with,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

NUM_TOKENS = 6
MAX_ERROR = 2e-4
Saved = tuple[Path, Any]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Checkpoints by text family and tower, each made once."""
    made: dict[tuple[str, str], Saved] = {}

    def get(text: str = "llama", tower: str = "clip") -> Saved:
        if (text, tower) not in made:
            folder = tmp_path_factory.mktemp(f"{text}-{tower}")
            made[text, tower] = folder, make_llava(folder, text, tower)
        return made[text, tower]

    return get


def answer(rig: Rig, slot: int, count: int = NUM_TOKENS) -> list[int]:
    """Decodes until the slot has `count` tokens of output."""
    row = rig.scheduler.rows[slot]
    while len(row.tokens) < row.num_prompt + count:
        rig.step()
    return row.tokens[row.num_prompt :][:count]


@pytest.mark.parametrize(
    ("text", "tower"),
    [
        *[("llama", "clip"), ("llama", "siglip"), ("qwen3-tied", "clip"), ("mistral-window", "clip")],
        *[("gemma-tied", "clip"), ("granite", "clip"), ("gemma2-caps-off", "siglip")],
    ],
)
def test_several_pictures_in_one_prompt(llava: Callable[..., Saved], text: str, tower: str) -> None:
    """Gemma scales the embeddings of tokens alone, Granite those of pictures, too."""
    folder, model = llava(text, tower)
    pictures = [picture(1), picture(2)]
    tokens, media = prompt_with(5, pictures[0], 3, pictures[1], 4)
    rig = Rig(folder)
    encode(rig, *pictures)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    assert answer(rig, 0) == greedy(model, tokens, pictures, NUM_TOKENS)
    if text == "granite":  # its logits are not scaled by transformers' class for pictures
        return
    rows = torch.stack(rig.logits[0])
    wanted = expected_logits(model, rig.tokens(0), pictures)[len(tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(wanted)], wanted, atol=MAX_ERROR, rtol=MAX_ERROR)


@pytest.mark.parametrize("chunk", [3, 5, NUM_ROWS])
def test_chunks_smaller_than_a_picture(llava: Callable[..., Saved], chunk: int) -> None:
    folder, model = llava()
    pictures = [picture(1), picture(2)]
    tokens, media = prompt_with(2, pictures[0], pictures[1], 4)
    rig = Rig(folder)
    encode(rig, *pictures)
    rig.step([New(0, tokens, media=tuple(media))], {0: chunk})
    while (left := len(tokens) - rig.scheduler.rows[0].num_computed) > 0:
        rig.step(counts={0: min(chunk, left)})
    assert answer(rig, 0) == greedy(model, tokens, pictures, NUM_TOKENS)


def test_a_prefix_hit_may_end_inside_of_a_picture(llava: Callable[..., Saved]) -> None:
    folder, model = llava()
    first, other = picture(1), picture(2)
    tokens, media = prompt_with(6, first, 5)
    rig = Rig(folder)
    encode(rig, first)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    expected = greedy(model, tokens, [first], NUM_TOKENS)
    assert answer(rig, 0) == expected
    encode(rig, other)
    later, media = prompt_with(6, first, other, 2)  # 6 + 16 tokens are equal, 5 blocks of 4 are cached
    rig.step([New(1, later, cached_blocks=rig.blocks(0)[:4], media=tuple(media))], {1: len(later) - 16})
    assert answer(rig, 1) == greedy(model, later, [first, other], NUM_TOKENS)


def test_sequences_share_a_picture_beside_text(llava: Callable[..., Saved]) -> None:
    folder, model = llava()
    shared = picture(3)
    rig = Rig(folder)
    encode(rig, shared)
    prompts = [prompt_with(4, shared, 2), prompt_with(13), prompt_with(1, shared, 7, shared, 1)]
    new = [New(slot, tokens, media=tuple(media)) for slot, (tokens, media) in enumerate(prompts)]
    rig.step(new, {0: 10, 1: 13, 2: 20})
    rig.step(counts={0: len(prompts[0][0]) - 10, 2: len(prompts[2][0]) - 20})
    for slot, (tokens, media) in enumerate(prompts):
        assert answer(rig, slot) == greedy(model, tokens, [shared] * len(media), NUM_TOKENS), slot


def test_a_sequence_is_resubmitted_with_its_output(llava: Callable[..., Saved]) -> None:
    """A preempted sequence computes its prompt and its output again."""
    folder, model = llava()
    pixels = picture(4)
    tokens, media = prompt_with(3, pixels, 3)
    rig = Rig(folder)
    encode(rig, pixels)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    so_far = answer(rig, 0, 3)
    expected = greedy(model, tokens, [pixels], 3 + NUM_TOKENS)
    assert so_far == expected[:3]
    again = New(1, tokens + so_far, num_prompt=len(tokens), media=tuple(media))
    rig.step([again], {1: len(tokens) + 3}, released=[0])
    assert answer(rig, 1, 3 + NUM_TOKENS) == expected


def test_the_placeholder_may_be_outside_of_the_vocabulary(tmp_path: Path, llava: Callable[..., Saved]) -> None:
    """PaliGemma's placeholder is the first id after its vocabulary; here, one far behind it."""
    folder, model = llava()
    pixels = picture(5)
    tokens, media = prompt_with(3, pixels, 3)
    outside = [100_000 if token == PLACEHOLDER else token for token in tokens]
    rig = Rig(folder)
    encode(rig, pixels)
    rig.step([New(0, outside, media=tuple(media))], {0: 10})
    rig.step(counts={0: len(tokens) - 10})
    assert answer(rig, 0) == greedy(model, tokens, [pixels], NUM_TOKENS)


def test_blocks_hash_as_the_scheduler_counts_them(llava: Callable[..., Saved]) -> None:
    """After a re-attach the scheduler finds the blocks by these hashes."""
    folder, _ = llava()
    pixels = picture(6)
    tokens, media = prompt_with(6, pixels, 7)
    outside = [100_000 if token == PLACEHOLDER else token for token in tokens]
    rig = Rig(folder)
    encode(rig, pixels)
    for slot, prompt in enumerate([tokens, outside]):
        rig.step([New(slot, prompt, media=tuple(media))], {slot: len(prompt)})
        so_far = rig.tokens(slot)
        items = [decode_item(item) for item in media]
        wanted = chain_with_media(root_hash(), i32_bytes(so_far), 4, items)[: len(prompt) // 4]
        report = rig.replica.end_epoch()
        found = dict(zip(split(report.hashes), report.block_ids, strict=True))
        assert [found[digest] for digest in wanted] == list(rig.blocks(slot))[: len(wanted)]
        rig.scheduler.rows.clear()
        rig.scheduler.sampling.clear()
        encode(rig, pixels)


def test_beams_share_the_pictures_of_their_prompt(llava: Callable[..., Saved]) -> None:
    """A sample whose last block is a copy of another's, as n > 1 and beams start."""
    folder, model = llava()
    pixels = picture(7)
    tokens, media = prompt_with(3, pixels, 4)  # 23 tokens: 5 full blocks and a part of one
    rig = Rig(folder)
    encode(rig, pixels)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    blocks = rig.blocks(0)
    rig.step([New(1, tokens, cached_blocks=blocks[:5], copied_block=blocks[5], media=tuple(media))])
    expected = greedy(model, tokens, [pixels], NUM_TOKENS)
    assert answer(rig, 0) == expected
    assert answer(rig, 1) == expected


def test_a_fully_cached_prompt_may_end_with_a_picture(llava: Callable[..., Saved]) -> None:
    """Its last token, a row of the picture, is computed again."""
    folder, model = llava()
    pixels = picture(8)
    tokens, media = prompt_with(4, pixels)
    rig = Rig(folder)
    encode(rig, pixels)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    rig.step([New(1, tokens, cached_blocks=rig.blocks(0)[:5], media=tuple(media))], {1: 1})
    expected = greedy(model, tokens, [pixels], NUM_TOKENS)
    assert answer(rig, 0) == expected
    assert answer(rig, 1) == expected


def test_an_item_that_is_not_kept_breaks_the_session(llava: Callable[..., Saved]) -> None:
    folder, _ = llava()
    tokens, media = prompt_with(3, picture(10), 3)
    rig = Rig(folder)
    with pytest.raises(PlanViolation, match="the rows of a media item are not kept"):
        rig.step([New(0, tokens, media=tuple(media))], {0: 5})


def test_the_language_model_alone_has_no_encoder(llava: Callable[..., Saved]) -> None:
    folder, _ = llava()
    tokens, media = prompt_with(3, picture(11), 3)
    rig = Rig(folder, language_model_only=True)
    assert rig.replica.media.capacity == 0
    with pytest.raises(PlanViolation, match="announced no encoder"):
        rig.step([New(0, tokens, media=tuple(media))], {0: 5})


def test_an_update_of_the_weights_replaces_the_tower(llava: Callable[..., Saved], tmp_path: Path) -> None:
    """Rows of the old weights are dropped with the KV."""
    folder, _ = llava()
    newer = make_llava(tmp_path, seed=11)
    pixels = picture(12)
    tokens, media = prompt_with(3, pixels, 3)
    rig = Rig(folder)
    encode(rig, pixels)
    with torch.inference_mode():
        rig.replica.update_weights(NewWeights(tmp_path))
    assert rig.replica.media.num_rows == 0
    encode(rig, pixels)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    assert answer(rig, 0) == greedy(newer, tokens, [pixels], NUM_TOKENS)


def test_an_update_without_the_tower_keeps_it(llava: Callable[..., Saved], tmp_path: Path) -> None:
    """Exports of fine-tuned text models."""
    folder, model = llava()
    make_llava(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    texts = {name: tensor for name, tensor in tensors.items() if "vision" not in name and "projector" not in name}
    save_file(texts, tmp_path / "model.safetensors", {"format": "pt"})
    pixels = picture(13)
    tokens, media = prompt_with(3, pixels, 3)
    rig = Rig(folder)
    with torch.inference_mode():
        rig.replica.update_weights(NewWeights(tmp_path))
    encode(rig, pixels)
    rig.step([New(0, tokens, media=tuple(media))], {0: len(tokens)})
    assert answer(rig, 0) == greedy(model, tokens, [pixels], NUM_TOKENS)


def test_a_folder_without_the_processor_opens_as_text(llava: Callable[..., Saved], tmp_path: Path) -> None:
    make_llava(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert Rig(tmp_path).replica.media.capacity == 0


def test_a_cache_smaller_than_a_picture_is_refused(llava: Callable[..., Saved]) -> None:
    folder, _ = llava()
    with pytest.raises(InvalidArgument, match="encoder_cache_size: 15 rows, and an item of this model may have 16"):
        Rig(folder, encoder_cache_size=NUM_ROWS - 1)


def test_the_size_of_a_model_counts_its_tower(llava: Callable[..., Saved]) -> None:
    folder, model = llava()
    sizes = {}
    for alone in (False, True):
        settings = WorkerSettings(model=str(folder), device="cuda", language_model_only=alone, encoder_cache_size=1000)
        sizes[alone] = footprint(settings, read_config(folder))
    tower = [*model.model.vision_tower.named_parameters(), *model.model.multi_modal_projector.named_parameters()]
    unused = ("post_layernorm", "layers.2.")  # the last layer's output is not read
    wanted = sum(value.numel() for name, value in tower if not any(part in name for part in unused))
    assert sizes[False].num_parameters - sizes[True].num_parameters == wanted
    assert sizes[False].activation_bytes - sizes[True].activation_bytes == 1000 * 48 * 4


def test_rows_are_dropped_by_sleep_alone_of_these_orders(llava: Callable[..., Saved]) -> None:
    """Staging may fail, and then the scheduler continues with the rows that it counts on."""
    folder, _ = llava()
    rig = Rig(folder)
    encode(rig, picture(14))
    for order, num_rows in [
        (worker_pb2.DeviceOrder(drop_weights=worker_pb2.DropWeights()), NUM_ROWS),
        (worker_pb2.DeviceOrder(sleep=worker_pb2.Sleep(level=1)), 0),
    ]:
        with torch.inference_mode():
            rig.replica.execute_order(order)
        assert rig.replica.media.num_rows == num_rows
