"""A scheduler's core and a worker's replica together, over the wire: T5, BART and their relatives answer as they do in
transformers, whatever happens to the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.shared.kv.kv_specs import FULL, Cross
from tests.services.worker.media.texts import (
    MODELS,
    SavedText,
    features,
    greedy,
    identifier_of,
    item_of,
    logits_of,
    prompt_of,
    save,
)
from tests.spec_decode.pair import Answer, Pair, build

NUM_TOKENS = 12
SIZES = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 6, "max_num_batched_tokens": 16}
A, B, C = prompt_of(9), prompt_of(1), prompt_of(50)
Get = Callable[[str], SavedText]
MAX_ERROR = 3e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Checkpoints by name, each made once."""
    made: dict[str, SavedText] = {}

    def get(name: str) -> SavedText:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def pair_of(text: SavedText, **settings: Any) -> Pair:
    return Pair(build(None, text.folder, **(SIZES | settings)))


def start_of(length: int) -> list[int]:
    return [0, *prompt_of(length - 1, seed=1)] if length > 1 else [0]


def ask(pair: Pair, length: int, prompt: list[int], **sampling: Any) -> Answer:
    pair.pixels[identifier_of(prompt)] = features(prompt)
    return pair.ask(start_of(length), NUM_TOKENS, eos=(), media=[item_of(prompt)], **sampling)


def check(text: SavedText, answers: list[tuple[Answer, list[int]]]) -> None:
    for number, (answer, prompt) in enumerate(answers):
        assert answer.tokens == greedy(text.model, prompt, answer.prompt, NUM_TOKENS), number


@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_chunks_of_several_lengths(saved: Get, name: str) -> None:
    text = saved(name)
    pair = pair_of(text)
    assert pair.core.limits.kv_specs == (FULL, Cross(64))
    answers = [(ask(pair, length, prompt), prompt) for length, prompt in ((30, A), (2, B), (1, C), (17, A), (44, B))]
    pair.run()
    answers.append((ask(pair, 44, B), B))  # its prefix is cached
    pair.run()
    check(text, answers)
    assert len({tuple(answer.tokens) for answer, _ in answers}) >= 4, "the answers depend on the prompts"
    assert pair.core.counts.cached_tokens >= 40


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_prompt_and_output(saved: Get, name: str) -> None:
    text = saved(name)
    pair = pair_of(text)
    answer = ask(pair, 9, A, logprobs=0, prompt_logprobs=0)
    pair.run()
    tokens = [*answer.prompt, *answer.tokens]
    wanted = logits_of(text.model, A, tokens).log_softmax(-1)
    found = [values[0] for _, values, _ in (*answer.prompt_logprobs, *answer.logprobs)]
    right = [float(wanted[i, token]) for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(found, right, atol=MAX_ERROR)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_preempted_sequences_answer_as_if_nothing_had_happened(saved: Get, name: str) -> None:
    text = saved(name)
    pair = pair_of(text, num_blocks=48)
    answers = [(ask(pair, 3 + 4 * number, prompt), prompt) for number, prompt in enumerate((A, B, C, A, C))]
    preempted = 0
    while pair.core.has_work:
        pair.turn()
        live = np.flatnonzero(pair.core.running.live).tolist()
        if live and preempted < 9:
            pair.core.preempt(live[preempted % len(live)])
            preempted += 1
    pair.run()
    assert preempted == 9
    check(text, answers)
    assert pair.core.kv.num_unowned() == 0


@pytest.mark.parametrize("name", ["t5_gated", "mbart"])
def test_samples_are_drawn_from_one_prompt(saved: Get, name: str) -> None:
    text = saved(name)
    pair = pair_of(text)
    family = SampleGroup()
    answers = [(ask(pair, 6, A, family=family), A) for _ in range(4)]
    pair.run()
    check(text, answers)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("t5", {"feed_forward_proj": "gated-silu"}),
        ("t5", {"relative_attention_num_buckets": 5, "relative_attention_max_distance": 9}),
        ("t5", {"num_decoder_layers": 1, "num_layers": 3}),
        ("t5_gated", {"feed_forward_proj": "relu"}),
        ("bart", {"scale_embedding": True, "activation_function": "relu"}),
        ("bart", {"encoder_attention_heads": 8, "decoder_attention_heads": 1, "decoder_layers": 1}),
        ("mbart", {"scale_embedding": False}),
    ],
)
def test_variants_of_the_configuration(tmp_path: Any, name: str, changes: dict[str, Any]) -> None:
    text = save(name, tmp_path, **changes)
    pair = pair_of(text)
    answers = [(ask(pair, length, prompt), prompt) for length, prompt in ((30, A), (7, C))]
    pair.run()
    check(text, answers)


RENAMED = {
    "t5": {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    "t5_gated": {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    "bart": {f"model.{part}.embed_tokens.weight": "model.shared.weight" for part in ("encoder", "decoder")}
    | {"lm_head.weight": "model.shared.weight"},
}


@pytest.mark.parametrize("name", RENAMED)
def test_files_of_transformers_4_repeat_the_embedding(tmp_path: Any, name: str) -> None:
    text = save(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {copy: tensors[source].clone() for copy, source in RENAMED[name].items()}, path)
    pair = pair_of(text)
    answer = ask(pair, 7, A)
    pair.run()
    check(text, [(answer, A)])


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_bart_files_with_one_copy_of_the_embedding(tmp_path: Any, part: str) -> None:
    text = save("bart", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.{part}.embed_tokens.weight"] = tensors.pop("model.shared.weight")
    save_file(tensors, path)
    pair = pair_of(text)
    answer = ask(pair, 7, A)
    pair.run()
    check(text, [(answer, A)])
