"""Models with sliding windows, scheduler and worker together: the text equals transformers', and blocks are
released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.services.worker.building.build import build_replica
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.kv import block_hash
from quire.shared.kv.kv_specs import FULL, Window
from quire.shared.settings import WorkerSettings
from tests.kv_groups import models
from tests.kv_groups.models import WINDOW, Make, greedy
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.spec_decode.pair import Pair, build

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8, "num_blocks": 400}

names = pytest.mark.parametrize("name", models.RANDOM)
backends = pytest.mark.parametrize("backend", ["cpu", "reference"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair(
    made: Checkpoint, speculation: dict[str, Any] | None = None, core: dict[str, Any] | None = None, **sizes: Any
) -> Pair:
    return Pair(build(speculation, made.folder, **{**SMALL, **sizes}), **(core or {}))


def most_in_use(run: Pair) -> int:
    """Returns the most blocks in use between two steps, until all are done."""
    most = 0
    while run.core.has_work or run.results:
        while run.plan():
            most = max(most, run.core.use.used)
        run.result()
    return most


def test_layers_form_groups_of_their_windows(made: Make) -> None:
    specs = {name: [group.spec for group in pair(made(name)).replica.limits.layout.groups] for name in models.RANDOM}
    window = Window(WINDOW)
    assert specs == {
        "all-windows": [window],
        "alternating": [FULL, window],
        "chunks": [FULL, window, window, window],
        "one-in-three": [FULL, FULL, window],
    }


@names
@backends
def test_text_is_that_of_transformers_though_prompts_come_in_chunks(made: Make, name: str, backend: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint, attention_backend=backend)
    prompts = [prompt(length, seed) for seed, length in enumerate((50, 3, 23, 9, 37))]
    answers = [run.ask(tokens, max_tokens=30, eos=()) for tokens in prompts]
    run.run()
    assert [answer.tokens for answer in answers] == [greedy(checkpoint, tokens, 30) for tokens in prompts]
    assert run.core.use.used == 0


@names
def test_conversation_finds_the_prefix_of_all_groups(made: Make, name: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint)
    first = prompt(40, 1)
    said = run.ask(first, max_tokens=12, eos=())
    run.run()
    again = first + said.tokens + prompt(5, 2)
    answer, beside = run.ask(again, max_tokens=20, eos=()), run.ask(first[:30] + prompt(8, 3), max_tokens=20, eos=())
    run.run()
    assert answer.tokens == greedy(checkpoint, again, 20)
    assert beside.tokens == greedy(checkpoint, beside.prompt, 20)
    assert run.core.counts.cached_tokens >= 48 + 28, "whole blocks of both"


def test_a_prefix_whose_last_blocks_are_gone_from_the_window_is_computed_again(made: Make) -> None:
    checkpoint = made("alternating")
    run = pair(checkpoint, num_blocks=60)
    first = prompt(60, 1)
    run.ask(first, max_tokens=2, eos=())
    run.run()
    others = [
        run.ask(prompt(40, seed), max_tokens=8, eos=()) for seed in range(5, 9)
    ]  # evict blocks that are not hit in time
    run.run()
    again = [run.ask([*first[:length], 1, 2], max_tokens=20, eos=()) for length in (20, 40, 60)]
    run.run()
    for answer in [*others, *again]:
        assert answer.tokens == greedy(checkpoint, answer.prompt, len(answer.tokens))


@names
def test_preempted_sequences_have_the_same_text(made: Make, name: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint, num_blocks=400)
    answers = [run.ask(prompt(20 + seed, seed), max_tokens=24, eos=()) for seed in range(4)]
    for turn in range(60):
        run.plan()
        if turn % 7 == 3:
            live = np.flatnonzero(run.core.running.live)
            if len(live):
                run.core.preempt(int(live[turn % len(live)]))
        if run.results:
            run.result()
    run.run()
    assert run.core.counts.preemptions > 3
    assert [a.tokens for a in answers] == [greedy(checkpoint, a.prompt, 24) for a in answers]


@names
def test_preemption_with_too_few_blocks(made: Make, name: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint, num_blocks=40 if name != "one-in-three" else 60, max_num_batched_tokens=8, max_model_len=64)
    answers = [run.ask(prompt(18 + seed, seed), max_tokens=30, eos=()) for seed in range(5)]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, a.prompt, 30) for a in answers]


def test_blocks_in_use_stay_bounded_by_the_window(made: Make) -> None:
    checkpoint = made("all-windows")
    run = pair(checkpoint, max_model_len=256)
    answer = run.ask(prompt(100), max_tokens=150, eos=())
    most = most_in_use(run)
    assert len(answer.tokens) == 150
    assert most <= -(-(WINDOW + 16 + 3) // 4) + 1, "the window, a chunk, and what is under way; all would be 63"
    assert answer.tokens == greedy(checkpoint, answer.prompt, 150)


def test_a_prompt_longer_than_all_blocks_fits_if_the_window_does(made: Make) -> None:
    checkpoint = made("all-windows")
    run = pair(checkpoint, num_blocks=9, max_model_len=256, max_num_seqs=2)
    answer = run.ask(prompt(150), max_tokens=20, eos=())
    run.run()
    assert answer.tokens == greedy(checkpoint, answer.prompt, 20)


def test_a_group_that_keeps_all_grows_beside_one_that_does_not(made: Make) -> None:
    run = pair(made("alternating"), max_model_len=256)
    run.ask(prompt(100), max_tokens=100, eos=())
    most = most_in_use(run)
    assert most <= 50 + -(-(WINDOW + 16 + 3) // 4) + 1, "200 positions of the full group, not 400 pages"


@names
def test_siblings_share_a_prefix_and_write_their_own_blocks(made: Make, name: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint)
    tokens, family = prompt(30, 4), SampleGroup()
    answers = [run.ask(tokens, max_tokens=20, eos=(), temperature=0.0, family=family) for _ in range(3)]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, tokens, 20)] * 3
    assert run.core.counts.cached_tokens >= 2 * 29


@names
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_change_no_text(made: Make, name: str, num_drafts: int) -> None:
    checkpoint = made(name)
    run = pair(checkpoint, {**NGRAM, "num_speculative_tokens": num_drafts})
    prompts = [prompt(6, 1) * 6, prompt(4, 2) * 5, prompt(25, 3)]
    answers = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, tokens, 40) for tokens in prompts]
    assert run.core.speculation.counts.accepted_tokens > 0


@names
def test_a_scheduler_that_restarts_finds_what_the_worker_holds(made: Make, name: str) -> None:
    checkpoint = made(name)
    run = pair(checkpoint)
    first = prompt(60, 1)
    said = run.ask(first, max_tokens=30, eos=())
    run.run()
    held = run.replica.end_epoch()
    later = Pair(run.replica)
    later.adopt(held)
    again = first + said.tokens
    answer, shorter = later.ask(again, max_tokens=20, eos=()), later.ask([*first[:41], 5], max_tokens=20, eos=())
    later.run()
    assert answer.tokens == greedy(checkpoint, again, 20)
    assert shorter.tokens == greedy(checkpoint, shorter.prompt, 20)
    assert later.core.counts.cached_tokens >= 84 + 40, "of a window, too, whose first blocks had been handed on"


def test_held_blocks_are_named_correctly_after_reuse(made: Make) -> None:
    checkpoint = made("all-windows")
    run = pair(checkpoint, num_blocks=24, max_num_seqs=2, max_model_len=256)
    asked = [run.ask(prompt(90, seed), max_tokens=40, eos=()) for seed in range(4)]
    run.run()
    held = run.replica.end_epoch()
    assert len(held.block_ids) > 10
    known = {digest: i for answer in asked for i, digest in enumerate(hashes_of(run, answer.prompt + answer.tokens))}
    assert all(held.hashes[32 * i : 32 * i + 32] in known for i in range(len(held.block_ids)))


def hashes_of(run: Pair, tokens: list[int]) -> list[bytes]:
    return block_hash.chain(block_hash.root_hash(), columns.i32_bytes(tokens), run.core.limits.block_size)


@pytest.mark.parametrize("family", ["gemma2", "gemma3-tied", "cohere2", "gpt-oss"])
def test_families_with_alternating_windows_match_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = models.checkpoints.make(family, tmp_path)
    run = pair(checkpoint)
    asked = [run.ask(prompt(length, length), max_tokens=24, eos=()) for length in (50, 7, 23)]
    run.run()
    asked.append(run.ask(asked[0].prompt + asked[0].tokens, max_tokens=12, eos=()))
    run.run()
    assert {str(group.spec) for group in run.replica.limits.layout.groups} == {"full", f"window({WINDOW})"}
    assert [a.tokens for a in asked] == [greedy(checkpoint, a.prompt, len(a.tokens)) for a in asked]
    assert run.core.counts.cached_tokens >= 72


@pytest.mark.slow
def test_quire_tiny_with_a_window_matches_transformers(tmp_path: Path) -> None:
    checkpoint = models.tiny(tmp_path / "tiny", window=24)
    run = pair(checkpoint, block_size=16)
    prompts = [[1, *range(100, 100 + length)] for length in (70, 20, 45)]
    answers = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, tokens, 40) for tokens in prompts]


def test_a_window_that_no_sequence_outgrows_is_no_window(made: Make) -> None:
    limits = pair(made("alternating"), max_model_len=WINDOW).replica.limits
    assert [group.spec for group in limits.layout.groups] == [FULL]


def test_a_window_of_one_is_refused_by_name(tmp_path: Path) -> None:
    folder = models.checkpoints.make("mistral-window", tmp_path, sliding_window=1).folder
    with pytest.raises(InvalidArgument, match="layer 0 has a window of 1, the least is 2"):
        build_replica(WorkerSettings(model=str(folder), num_blocks=20))
