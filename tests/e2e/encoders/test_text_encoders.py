"""T5 and BART through a whole cluster: programs and HTTP clients get the tokens of transformers for a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import processors

from quire import LLM, SamplingParams
from quire.shared.errors import QuireError
from tests.services.frontend.tiny_folder import byte_level_tokenizer
from tests.services.worker.media.texts import SavedText, greedy, save

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 8
TEXTS = ["translate: a house", "b", "summarize: the same words twice, the same words twice"]


class Served:
    """A cluster that serves a model, with the same model of transformers."""

    def __init__(self, llm: LLM, text: SavedText, tokenizer: Any, start: list[int]) -> None:
        self.llm, self.text, self.tokenizer, self.start = llm, text, tokenizer, start

    def expected(self, prompt: str | list[int], decoder: list[int] | None = None) -> list[int]:
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return greedy(self.text.model, ids, self.start if decoder is None else decoder, NUM_TOKENS)


def _saved(name: str, folder: Path) -> tuple[SavedText, Any]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="</s>")
    end = tokenizer.convert_tokens_to_ids("</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    text = save(name, folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return text, tokenizer


@pytest.fixture(scope="module", params=["t5", "bart"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / request.param
    text, tokenizer = _saved(request.param, folder)
    start = [0] if request.param == "t5" else [2, 5]
    if len(start) > 1:
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"forced_bos_token_id": start[1]}))
    with LLM(model=str(folder), dtype="float32", block_size=8, num_blocks=200, max_num_seqs=16) as llm:
        yield Served(llm, text, tokenizer, start)


def greedily(**fields: Any) -> SamplingParams:
    return SamplingParams(top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)


def test_prompts_go_to_the_encoder(served: Served) -> None:
    answers = served.llm.generate(TEXTS, greedily())
    found = [list(answer.outputs[0].token_ids) for answer in answers]
    assert found == [served.expected(text) for text in TEXTS]
    assert len({*map(tuple, found)}) > 1


def test_token_ids_and_samples(served: Served) -> None:
    (answer,) = served.llm.generate([{"prompt_token_ids": [9, 8, 7]}], greedily(n=3, seed=1))
    assert [list(output.token_ids) for output in answer.outputs] == [served.expected([9, 8, 7])] * 3


@pytest.mark.parametrize(("decoder", "is_begun"), [([11, 12], False), ([11, 12], True), (None, False)])
def test_prompts_of_encoder_and_decoder(served: Served, decoder: list[int] | None, is_begun: bool) -> None:
    """The form {"encoder_prompt": ..., "decoder_prompt": ...} of vLLM, where the start token may be left out."""
    first = served.start[:1]
    given = [*first, *decoder] if is_begun and decoder else decoder
    prompt = {"encoder_prompt": TEXTS[0], "decoder_prompt": given}
    (answer,) = served.llm.generate([prompt], greedily())
    continued = served.start if decoder is None else [*first, *decoder]
    assert list(answer.outputs[0].token_ids) == served.expected(TEXTS[0], continued)


def test_a_decoder_prompt_may_be_text_and_the_encoder_prompt_a_dict(served: Served) -> None:
    prompt = {"encoder_prompt": {"prompt_token_ids": [9, 8, 7]}, "decoder_prompt": "ab"}
    (answer,) = served.llm.generate([prompt], greedily())
    ids = served.tokenizer("ab", add_special_tokens=False).input_ids
    assert list(answer.outputs[0].token_ids) == served.expected([9, 8, 7], [served.start[0], *ids])


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"prompt_token_ids": [5] * 65}, "maximum context length is 64"),
        ({"prompt_token_ids": []}, "it is empty"),
        ({"prompt_token_ids": [10_000]}, "out of vocabulary"),
        ({"encoder_prompt": "a", "decoder_prompt": [10_000]}, "out of vocabulary"),
        ({"encoder_prompt": "a", "prompt": "b"}, "'prompt' does not go with encoder_prompt"),
    ],
)
def test_prompts_that_the_encoder_cannot_take(served: Served, prompt: Any, text: str) -> None:
    with pytest.raises(QuireError, match=text):
        served.llm.generate([prompt], greedily())
