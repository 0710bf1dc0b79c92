"""Whisper through a whole cluster: Python programs get the tokens of transformers for a clip and a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transformers

from quire import LLM, SamplingParams
from quire.shared.errors import QuireError
from tests.services.frontend.tiny_folder import byte_level_tokenizer
from tests.services.worker.media.sounds import greedy, make_whisper
from tests.shared.media.audio.files import noise, wav

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS, NUM_BINS, RATE = 8, 20, 16_000
START = "<|startoftranscript|>"
SPECIAL = [START, "<|endoftext|>", "<|notimestamps|>", "<|0.00|>"]


class Transcriber:
    """A cluster that serves Whisper, with the same model of transformers."""

    def __init__(self, llm: LLM, model: Any, start: int) -> None:
        self.llm, self._model, self.start = llm, model, start
        self._extract = transformers.WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=1)

    def expected(self, clip: np.ndarray, prompt: list[int]) -> list[int]:
        features = self._extract(clip, sampling_rate=RATE, return_tensors="np").input_features
        return greedy(self._model, features, prompt, NUM_TOKENS)


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transcriber]:
    folder = tmp_path_factory.mktemp("models") / "whisper"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    model = make_whisper(folder, vocab_size=len(tokenizer), num_mel_bins=NUM_BINS, max_source_positions=50)
    tokenizer.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=1)
    extractor.save_pretrained(folder)
    with LLM(model=str(folder), dtype="float32", block_size=8, num_blocks=200, max_num_seqs=16) as llm:
        yield Transcriber(llm, model, tokenizer.convert_tokens_to_ids(START))


def greedily(**fields: Any) -> SamplingParams:
    return SamplingParams(top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)


def test_answers_are_those_of_transformers(transcriber: Transcriber) -> None:
    clips = [noise(7_000), noise(16_000, seed=1), noise(1, seed=2)]
    prompts = [[transcriber.start], [transcriber.start, 5, 6, 7], [transcriber.start, *range(10, 30)]]
    pairs = [(clip, prompt) for clip in clips for prompt in prompts]
    asked = [{"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip, RATE)}} for clip, prompt in pairs]
    answers = transcriber.llm.generate(asked, greedily())
    expected = [transcriber.expected(clip, prompt) for clip, prompt in pairs]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected


def test_samples_and_files(transcriber: Transcriber) -> None:
    clip = (np.round(noise(8_000, seed=3) * 32767) / 32768).astype(np.float32)
    prompt = {
        "prompt_token_ids": [transcriber.start, 7],
        "multi_modal_data": {"audio": wav(clip * 32768 / 32767, RATE)},
    }
    (answer,) = transcriber.llm.generate([prompt], greedily(n=3, seed=1))
    expected = transcriber.expected(clip, [transcriber.start, 7])
    assert [list(output.token_ids) for output in answer.outputs] == [expected] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "The prompt has 0 clips, and this model's decoder attends to exactly one"),
        ({"audio": [(noise(100), RATE)] * 2}, "The prompt has 2 clips"),
        ({"audio": (noise(RATE + 1), RATE)}, "lasts longer than 1 s"),
    ],
)
def test_prompts_without_exactly_one_clip_are_refused(
    transcriber: Transcriber, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(QuireError, match=text):
        transcriber.llm.generate([{"prompt": START, "multi_modal_data": given}], greedily())
