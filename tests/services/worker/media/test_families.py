"""Answers of Gemma 3, Mistral 3 and Pixtral about pictures are those of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from quire.services.worker.step.fetched_item import FetchedItem
from tests.services.worker.media.families import (
    FAMILIES,
    NUM_TOKENS,
    Checkpoint,
    Prompt,
    greedy,
    greedy_with_logits,
    inputs,
    prompt,
    save,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig
from tests.spec_decode.pair import Pair, build

MAX_ERROR = 2e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoints by name, each made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
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


def assert_logits(rig: Rig, slot: int, checkpoint: Checkpoint, asked: Prompt) -> None:
    rows = torch.stack(rig.logits[slot])
    if checkpoint.model.config.model_type == "paligemma":  # in a single pass, its prompt sees the answer as well
        wanted = greedy_with_logits(checkpoint, asked)[1]
    else:
        with torch.inference_mode():
            wanted = checkpoint.model(**inputs(checkpoint, rig.tokens(slot), asked.items)).logits[0].float()
        wanted = wanted[len(asked.tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(wanted)], wanted, atol=MAX_ERROR, rtol=MAX_ERROR)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_pictures_in_one_prompt(saved: Callable[[str], Checkpoint], name: str) -> None:
    checkpoint = saved(name)
    asked = prompt(checkpoint, 5, *(part for size in checkpoint.family.sizes for part in (size, 3)))
    rig = Rig(checkpoint.folder)
    encode(rig, asked.items)
    rig.step([New(0, asked.tokens, media=asked.media)], {0: len(asked.tokens)})
    assert answer(rig, 0) == greedy(checkpoint, asked)
    assert_logits(rig, 0, checkpoint, asked)


@pytest.mark.parametrize("name", ["gemma3", "gemma3-window", "gemma3-crops", "mistral3"])
def test_chunks_that_end_where_pictures_begin(saved: Callable[[str], Checkpoint], name: str) -> None:
    checkpoint = saved(name)
    asked = prompt(checkpoint, 5, *(part for size in checkpoint.family.sizes for part in (size, 3)))
    rig = Rig(checkpoint.folder)
    encode(rig, asked.items)
    starts = [item.offset for item in asked.media]
    ends = [starts[0], *starts[1:], len(asked.tokens)]
    rig.step([New(0, asked.tokens, media=asked.media)], {0: ends[0]})
    for first, last in itertools.pairwise(ends):
        rig.step(counts={0: last - first})
    assert answer(rig, 0) == greedy(checkpoint, asked)


@pytest.mark.parametrize("name", ["gemma3-window", "mistral3"])
def test_sequences_with_and_without_pictures_in_one_step(saved: Callable[[str], Checkpoint], name: str) -> None:
    checkpoint = saved(name)
    first, second = checkpoint.family.sizes[:2]
    prompts = [prompt(checkpoint, 4, first, 2), prompt(checkpoint, 13), prompt(checkpoint, 1, second, first, second, 1)]
    rig = Rig(checkpoint.folder)
    encode(rig, [item for asked in prompts for item in asked.items])
    new = [New(slot, asked.tokens, media=asked.media) for slot, asked in enumerate(prompts)]
    rig.step(new, {slot: len(asked.tokens) for slot, asked in enumerate(prompts)})
    for slot, asked in enumerate(prompts):
        assert answer(rig, slot) == greedy(checkpoint, asked), slot


@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
def test_prompts_whose_tokens_see_each_other_share_no_prefix(saved: Callable[[str], Checkpoint], name: str) -> None:
    """The second one begins with the tokens of the first, which see further ones there."""
    checkpoint = saved(name)
    (size,) = checkpoint.family.sizes
    prompts = [prompt(checkpoint, 5, size, count) for count in (4, 30, 4)]
    pair = Pair(build(None, checkpoint.folder, block_size=4, num_blocks=200, max_num_seqs=2, max_num_batched_tokens=24))
    pair.pixels |= {item.identifier: item.pixels for asked in prompts for item in asked.items}
    for asked in prompts:
        said = pair.ask(asked.tokens, NUM_TOKENS, eos=(), media=asked.media)
        pair.run()
        assert said.tokens == greedy(checkpoint, asked)
    assert pair.core.counts.cached_tokens == 0
    answered = pair.ask([*prompts[0].tokens, *said.tokens, 7], NUM_TOKENS, eos=(), media=prompts[0].media)
    pair.run()
    assert len(answered.tokens) == NUM_TOKENS
    assert pair.core.counts.cached_tokens > 0, "a prompt that goes on behind what saw each other"


def test_a_prompt_whose_tokens_see_each_other_is_preempted(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint = saved("paligemma")
    (size,) = checkpoint.family.sizes
    prompts = [prompt(checkpoint, count, size, 3) for count in (5, 9, 2)]
    pair = Pair(build(None, checkpoint.folder, block_size=4, num_blocks=60, max_num_seqs=3))
    pair.pixels |= {item.identifier: item.pixels for asked in prompts for item in asked.items}
    answers = [pair.ask(asked.tokens, NUM_TOKENS, eos=(), media=asked.media) for asked in prompts]
    pair.preempt_often(20)
    pair.run()
    assert [answer.tokens for answer in answers] == [greedy(checkpoint, asked) for asked in prompts]


def test_the_mask_of_a_picture_matters(saved: Callable[[str], Checkpoint]) -> None:
    """Without it, the logits would be others: the comparisons above would fail."""
    checkpoint = saved("gemma3-window")
    asked = prompt(checkpoint, 5, *checkpoint.family.sizes, 3)
    given = inputs(checkpoint, asked.tokens, asked.items)
    with torch.inference_mode():
        seen = checkpoint.model(**given).logits[0, -1]
        causal = checkpoint.model(**{**given, "token_type_ids": torch.zeros_like(given["input_ids"])}).logits[0, -1]
    assert (seen - causal).abs().max() > 100 * MAX_ERROR


def test_text_alone_takes_the_tape_as_before(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint = saved("gemma3")
    asked = prompt(checkpoint, 17)
    rig = Rig(checkpoint.folder)
    rig.step([New(0, asked.tokens)], {0: 17})
    assert answer(rig, 0) == greedy(checkpoint, asked)


@pytest.mark.parametrize(("name", "is_whole"), [("gemma3", True), ("mistral3", False)])
def test_steps_hold_a_picture_that_is_computed_as_a_whole(
    saved: Callable[[str], Checkpoint], name: str, is_whole: bool
) -> None:
    checkpoint = saved(name)
    rig = Rig(checkpoint.folder, max_num_batched_tokens=10)
    assert rig.replica.media.whole_items == is_whole
    largest = prompt(checkpoint, (200, 50))
    num_tokens = rig.replica.limits.max_num_batched_tokens
    assert num_tokens == 10 or num_tokens >= len(largest.tokens) + rig.replica.limits.max_num_seqs
    assert (num_tokens > 10) == is_whole
    text_only = Rig(checkpoint.folder, max_num_batched_tokens=10, language_model_only=True)
    assert text_only.replica.limits.max_num_batched_tokens == 10
    assert not text_only.replica.media.whole_items
