"""Loads and orders of requests under which other servers were reported to stall, mix up requests or answer wrongly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLMEngine, LoRARequest, RequestOutput, SamplingParams, StructuredOutput
from quire.bundled import ADAPTERS, FOLDER
from quire.shared.errors import InvalidArgument, QuireError
from tests.services.in_process.engine_parts import engine_core_of

SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 300, "dtype": "float32", "max_num_seqs": 16}
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]
GREEDY = SamplingParams(max_tokens=40, temperature=0)
SAYS = {"pirate": "Ahoy! 68 Arr!", "json": '{"answer": "68"}'}
FORM = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "why": {"anyOf": [{"type": "null"}, {"enum": ["a", "b"]}]}},
    "required": ["kind", "why"],
    "additionalProperties": False,
}


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until all requests have ended and released everything."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    core = engine_core_of(engine).core
    assert (core.has_work, core.kv.use.used) == (False, 0)
    return ended


def prompt(engine: LLMEngine) -> list[int]:
    text = engine.get_tokenizer().apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    return list(engine.get_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def adapters() -> Iterator[LLMEngine]:
    with LLMEngine(**SETTINGS, lora_folders=[str(ADAPTERS)], max_loras=8) as engine:
        yield engine


def test_cached_prefixes_of_an_unloaded_adapter_are_not_reused(adapters: LLMEngine) -> None:
    """lo01, vllm#42125: the next adapter of the same name reused the keys and values of the one before."""
    asked = prompt(adapters) * 6

    def ask() -> RequestOutput:
        adapters.add_request("1", asked, GREEDY, lora_request=LoRARequest("x"))
        return run(adapters)["1"]

    adapters.load_lora_adapter("x", "pirate")
    first, again = ask(), ask()
    assert (first.cached_tokens, again.text) == (0, first.text)
    assert again.cached_tokens > 0
    adapters.unload_lora_adapter("x")
    adapters.load_lora_adapter("x", "json")
    other = ask()
    assert other.cached_tokens == 0
    adapters.load_lora_adapter("y", "json")
    adapters.add_request("2", asked, GREEDY, lora_request=LoRARequest("y"))
    assert other.text == run(adapters)["2"].text != first.text


def test_an_adapter_swap_does_not_affect_running_answers(adapters: LLMEngine) -> None:
    """lo02: six swaps under a name that three clients keep requesting."""
    asked, found, number = prompt(adapters), [], 0
    adapters.load_lora_adapter("x", "pirate")
    for swap in range(6):
        for _ in range(3):
            adapters.add_request(f"{number}", asked, GREEDY, lora_request=LoRARequest("x"))
            number += 1
        for _ in range(1 + swap):
            found += [output.text for output in adapters.step() if output.finished]
        adapters.load_lora_adapter("x", ["json", "pirate"][swap % 2], load_inplace=True)
    found += [output.text for output in run(adapters).values()]
    assert len(found) == number
    assert set(found) == set(SAYS.values())


def test_a_context_beyond_the_kv_pool_is_refused_at_start() -> None:
    """sc01, vllm#39734: a sequence longer than all of the KV memory waited forever."""
    with pytest.raises(QuireError, match="max_model_len: 2048 tokens do not fit in the KV memory, which holds 368"):
        LLMEngine(**{**SETTINGS, "num_blocks": 24}, max_model_len=2048)


def test_all_requests_finish_despite_repeated_preemption() -> None:
    """sc02, vllm PR 21793: speculative decoding under memory pressure. All requests together need twice the available
    blocks."""
    sampling = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    prompts = [[(7 * i + 13 * j) % 200 + 20 for i in range(150)] for j in range(14)]
    with LLMEngine(**{**SETTINGS, "num_blocks": 130}, speculative_config=NGRAM) as engine:
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), ids, sampling)
        ended = run(engine)
        (alone,) = engine.generate([prompts[3]], sampling)
    assert {len(output.outputs[0].token_ids) for output in ended.values()} == {150}
    assert ended["3"].outputs[0].token_ids == alone.outputs[0].token_ids


def test_drafts_respect_the_grammar() -> None:
    """sc03, vllm#15554: a draft that leaves the grammar ended the request with an error of the grammar."""
    sampling = SamplingParams(max_tokens=60, temperature=1.0, structured_output=StructuredOutput(json=FORM))
    text = 'Answer as in {"kind": "one", "why": null} or {"kind": "two", "why": "a"}: '
    with LLMEngine(**SETTINGS, speculative_config=NGRAM) as engine:
        found = engine.generate([text] * 12, sampling)
    assert [output.error for output in found] == [None] * len(found)
    ended = [output for output in found if output.outputs[0].finish_reason == "stop"]  # white space may fill others
    assert ended
    for output in ended:
        value = json.loads(output.text)
        assert (value["kind"] in ("one", "two"), value["why"] in (None, "a", "b"), len(value)) == (True, True, 2)


def test_grammar_requests_are_served_after_long_answers() -> None:
    """sc05, vllm#53130: requests whose grammar was compiled while no slot was free never finished."""
    with LLMEngine(**{**SETTINGS, "max_num_seqs": 2}) as engine:
        for number in range(6):
            engine.add_request(f"long-{number}", "Once upon", SamplingParams(max_tokens=60, ignore_eos=True))
        form = SamplingParams(max_tokens=60, temperature=0, structured_output=StructuredOutput(json=FORM))
        engine.add_request("form", "Answer: ", form)
        broken = SamplingParams(max_tokens=60, structured_output=StructuredOutput(json={"type": "nothing"}))
        with pytest.raises(InvalidArgument, match="type"):
            engine.add_request("broken", "Answer: ", broken)
        ended = run(engine)
    assert len(ended) == 7
    assert json.loads(ended["form"].text)["kind"] in ("one", "two")


def test_end_tokens_of_generation_config_do_not_end_a_grammar(tmp_path: Path) -> None:
    """so27, vllm#42403: an end token of generation_config's list ended a JSON string in its middle."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    config = json.loads((folder / "generation_config.json").read_text())
    ends = [2, 0, 1]
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    schema = {"type": "string", "minLength": 20, "maxLength": 40}
    with LLMEngine(model=str(folder), **SETTINGS) as engine:
        for end in ends:
            sampling = SamplingParams(
                max_tokens=80, logit_bias={end: 100.0}, structured_output=StructuredOutput(json=schema)
            )
            (output,) = engine.generate(["A word: "], sampling)
            assert 20 <= len(json.loads(output.text)) <= 40
            assert output.outputs[0].finish_reason == "stop"
