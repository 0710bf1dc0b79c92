"""Encoder-decoder models divided among two ranks: schedulers get one rank's text, with chunked, cached and preempted
prompts, as transformers computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.services.scheduler.core.sequences.sequence import SampleGroup
from tests.services.worker.media import sounds, texts
from tests.services.worker.ranks.ranked_pair import RankedPair, ranked_pair
from tests.spec_decode.pair import Answer

NUM_TOKENS = 8
SIZES = {"block_size": 4, "num_blocks": 120, "max_num_seqs": 6, "max_num_batched_tokens": 16}


def run_preempting(pair: RankedPair) -> None:
    preempted = 0
    while pair.core.has_work:
        pair.turn()
        live = np.flatnonzero(pair.core.running.live).tolist()
        if live and preempted < 4:
            pair.core.preempt(live[preempted % len(live)])
            preempted += 1
    assert preempted == 4


def test_whisper(tmp_path: Path) -> None:
    model = sounds.make_whisper(tmp_path)
    clips = [sounds.spectrogram(seed) for seed in (1, 2)]
    with ranked_pair(tmp_path, **SIZES) as pair:

        def ask(length: int, clip: sounds.Features, **sampling: object) -> tuple[Answer, sounds.Features]:
            pair.pixels[sounds.identifier_of(clip)] = clip
            prompt = [3, *((7 * i + 5) % sounds.VOCAB_SIZE for i in range(length - 1))]
            return pair.ask(prompt, NUM_TOKENS, eos=(), media=[sounds.item_of(clip)], **sampling), clip

        family = SampleGroup()
        answers = [ask(length, clip) for length, clip in ((30, clips[0]), (2, clips[1]), (17, clips[0]))]
        answers += [ask(5, clips[1], family=family) for _ in range(2)]
        run_preempting(pair)
        answers.append(ask(30, clips[0]))  # its prefix is cached
        pair.run()
    for answer, clip in answers:
        assert answer.tokens == sounds.greedy(model, clip, answer.prompt, NUM_TOKENS)


@pytest.mark.parametrize("name", ["t5_gated", "bart"])
def test_texts(tmp_path: Path, name: str) -> None:
    saved = texts.save(name, tmp_path)
    prompts = [texts.prompt_of(9), texts.prompt_of(40)]
    with ranked_pair(tmp_path, **SIZES) as pair:

        def ask(length: int, prompt: list[int]) -> tuple[Answer, list[int]]:
            pair.pixels[texts.identifier_of(prompt)] = texts.features(prompt)
            start = [0, *texts.prompt_of(length - 1, seed=1)] if length > 1 else [0]
            return pair.ask(start, NUM_TOKENS, eos=(), media=[texts.item_of(prompt)]), prompt

        answers = [ask(length, prompt) for length, prompt in ((30, prompts[0]), (1, prompts[1]), (7, prompts[0]))]
        run_preempting(pair)
    for answer, prompt in answers:
        assert answer.tokens == texts.greedy(saved.model, prompt, answer.prompt, NUM_TOKENS)
