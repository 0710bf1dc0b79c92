"""A scheduler's core and a worker's replica together, over the wire: a decoder attends to the output of its encoder,
whatever happens to the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.shared.kv.kv_specs import FULL, Cross
from tests.services.worker.media.sounds import (
    NUM_ROWS,
    VOCAB_SIZE,
    Features,
    greedy,
    identifier_of,
    item_of,
    logits_of,
    make_whisper,
    spectrogram,
)
from tests.spec_decode.pair import Answer, Pair, build

NUM_TOKENS = 12
SIZES = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 6, "max_num_batched_tokens": 16}
Saved = tuple[Path, Any]
A, B, C = spectrogram(1), spectrogram(2), spectrogram(3)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, make_whisper(folder)


def pair_of(whisper: Saved, **settings: Any) -> Pair:
    return Pair(build(None, whisper[0], **(SIZES | settings)))


def prompt_of(length: int) -> list[int]:
    return [3, *((7 * i + 5) % VOCAB_SIZE for i in range(length - 1))]


def ask(pair: Pair, length: int, sound: Features, **sampling: Any) -> Answer:
    pair.pixels[identifier_of(sound)] = sound
    return pair.ask(prompt_of(length), NUM_TOKENS, eos=(), media=[item_of(sound)], **sampling)


def check(whisper: Saved, answers: list[tuple[Answer, Features]]) -> None:
    for number, (answer, sound) in enumerate(answers):
        assert answer.tokens == greedy(whisper[1], sound, answer.prompt, NUM_TOKENS), number


def test_the_hello_names_the_group(whisper: Saved) -> None:
    assert pair_of(whisper).core.limits.kv_specs == (FULL, Cross(NUM_ROWS))


def test_prompts_in_chunks_of_several_lengths(whisper: Saved) -> None:
    pair = pair_of(whisper)
    answers = [(ask(pair, length, sound), sound) for length, sound in ((30, A), (2, B), (1, C), (17, A), (44, B))]
    pair.run()
    answers.append((ask(pair, 44, B), B))  # its prefix is cached
    pair.run()
    check(whisper, answers)


def test_preempted_and_cancelled_sequences_leave_the_others_right(whisper: Saved) -> None:
    pair = pair_of(whisper, num_blocks=40)
    answers = [(ask(pair, 3 + 4 * number, sound), sound) for number, sound in enumerate((A, B, C, A, C))]
    gone, preempted = ask(pair, 9, B), 0
    while pair.core.has_work:
        pair.turn()
        live = np.flatnonzero(pair.core.running.live).tolist()
        if live and preempted < 9:
            pair.core.preempt(live[preempted % len(live)])
            preempted += 1
        if pair.num_steps > 4:
            pair.core.cancel(5)
    pair.run()
    assert gone.end is not None
    assert gone.end.reason is Reason.CANCELLED
    assert preempted == 9
    check(whisper, answers)
    assert pair.core.kv.num_unowned() == 0


def test_samples_are_drawn_from_one_sound(whisper: Saved) -> None:
    pair = pair_of(whisper)
    family = SampleGroup()
    answers = [(ask(pair, 6, A, family=family), A) for _ in range(4)]
    pair.run()
    check(whisper, answers)


def test_log_probabilities_of_prompt_and_output(whisper: Saved) -> None:
    pair = pair_of(whisper)
    answer = ask(pair, 9, A, logprobs=0, prompt_logprobs=0)
    pair.run()
    tokens = [*answer.prompt, *answer.tokens]
    wanted = logits_of(whisper[1], A, tokens).log_softmax(-1)
    found = [values[0] for _, values, _ in (*answer.prompt_logprobs, *answer.logprobs)]
    right = [float(wanted[i, token]) for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(found, right, atol=3e-5)


def test_output_under_a_grammar(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = tmp_path, make_whisper(tmp_path, vocab_size=len(alphabet) + 4)
    pair = pair_of(saved)
    answer = ask(pair, 5, A, structured_output={"regex": "[a-f]{40}"})
    free = ask(pair, 5, A)
    pair.run()
    check(saved, [(free, A)])
    assert {alphabet[token] for token in answer.tokens} <= set("abcdef")
    banned = [number for number in range(len(alphabet) + 4) if number not in map(alphabet.index, "abcdef")]
    assert answer.tokens == greedy(saved[1], A, answer.prompt, NUM_TOKENS, banned)


def test_a_scheduler_that_comes_back_has_the_item_encoded_again(whisper: Saved) -> None:
    pair = pair_of(whisper)
    first = ask(pair, 20, A)
    pair.run()
    again = Pair(pair.replica)
    held = pair.replica.end_epoch()
    again.adopt(held)
    assert set(held.groups) <= {0}, "only blocks of tokens are reported"
    second = ask(again, 20, A)
    again.run()
    check(whisper, [(first, A), (second, A)])
    assert again.core.counts.cached_tokens >= 16


def test_half_precision_serves_within_its_rounding(whisper: Saved) -> None:
    pair = pair_of(whisper, dtype="bfloat16")
    answer = ask(pair, 9, A, logprobs=0)
    pair.run()
    tokens = [*answer.prompt, *answer.tokens]
    wanted = logits_of(whisper[1], A, tokens).log_softmax(-1)
    right = [float(wanted[len(answer.prompt) - 1 + i, token]) for i, token in enumerate(answer.tokens)]
    np.testing.assert_allclose([values[0] for _, values, _ in answer.logprobs], right, atol=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_on_a_gpu(whisper: Saved, backend: str) -> None:
    pair = pair_of(whisper, device="cuda", attention_backend=backend, block_size=64 if backend == "auto" else 16)
    answers = [(ask(pair, length, sound), sound) for length, sound in ((30, A), (2, B), (1, C), (17, A))]
    pair.run()
    check(whisper, answers)
    torch.cuda.synchronize()
