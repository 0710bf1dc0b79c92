"""Tests of /generate with the requests of SGLang's clients."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import Running
from tests.services.frontend.tool_model import tool_model_folder, tool_server


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def asked(frontend: Running, **body: Any) -> Any:
    reply = await frontend.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_text_and_its_metadata(tool_model: Path) -> None:
    async with tool_server(tool_model, "one two") as (frontend, _, script):
        script.num_cached_tokens = 1
        answer = await asked(frontend, text="Count.", rid="mine", sampling_params={"max_new_tokens": 1, "top_k": 5})
        ended = await asked(frontend, input_ids=[5, 6], sampling_params={"temperature": 0})
        stopped = await asked(frontend, text="Count.", sampling_params={"stop": " t", "no_stop_trim": True})
    facts = answer["meta_info"]
    assert (facts["id"], facts["completion_tokens"], facts["cached_tokens"]) == ("mine", 1, 1)
    assert facts["finish_reason"] == {"type": "length", "length": 1}
    assert facts["prompt_tokens"] == script.submissions[0].num_prompt_tokens
    assert facts["e2e_latency"] > 0
    assert len(answer["output_ids"]) == 1
    assert ended["text"] == "one two"
    assert ended["meta_info"]["finish_reason"]["type"] == "stop"
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == ("one t", {"type": "stop", "matched": " t"})
    assert (script.submissions[0].sampling.top_k, script.submissions[1].max_tokens) == (5, 128)


async def test_a_stream_repeats_the_text_so_far(tool_model: Path) -> None:
    text = "one two three four five six seven eight"
    async with tool_server(tool_model, text) as (frontend, _, script):
        frontend.write_each_token(script)
        reply = await frontend.http.post("/generate", json={"text": "Count.", "stream": True})
        several = await frontend.http.post("/generate", json={"text": ["a", "b"], "stream": True})
    *events, done = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    texts = [json.loads(event)["text"] for event in events]
    assert (done, texts[-1]) == ("[DONE]", text)
    assert len(texts) > 1
    assert all(later.startswith(text) for text, later in pairwise(texts))
    numbers = {json.loads(line[6:])["index"] for line in several.text.splitlines() if line.startswith("data: {")}
    assert numbers == {0, 1}


async def test_several_prompts_or_samples_are_a_list(tool_model: Path) -> None:
    async with tool_server(tool_model, "one") as (frontend, _, _script):
        texts = await asked(frontend, text=["a", "b"])
        ids = await asked(frontend, input_ids=[[5], [6], [7]])
        samples = await asked(frontend, text="a", sampling_params={"n": 2, "temperature": 1})
    assert [[one["text"] for one in answer] for answer in (texts, ids, samples)] == [
        ["one"] * 2,
        ["one"] * 3,
        ["one"] * 2,
    ]


async def test_log_probabilities_are_triples(tool_model: Path) -> None:
    async with tool_server(tool_model, "one") as (frontend, _, _script):
        answer = await asked(
            frontend,
            input_ids=[5, 6, 7],
            return_logprob=True,
            top_logprobs_num=2,
            logprob_start_len=0,
            return_text_in_logprobs=True,
        )
    facts = answer["meta_info"]
    assert [entry[1] for entry in facts["output_token_logprobs"]] == answer["output_ids"]
    assert {len(entry) for entry in facts["output_token_logprobs"]} == {3}
    assert isinstance(facts["output_token_logprobs"][0][2], str)
    assert [len(entry) for entry in facts["output_top_logprobs"]] == [2] * len(answer["output_ids"])
    assert [entry[1] for entry in facts["input_token_logprobs"]] == [6, 7]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "text", "exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "exactly one of text and input_ids"),
        ({"text": []}, "text", "at least one"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 3}}, "inputs", "send text and sampling_params"),  # TGI
        ({"text": "a", "image_data": "x"}, "image_data", "image_data"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", "not permitted"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens", "must be at least 1"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf", "send one of them"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "structured_output", ""),
    ],
)
async def test_refusals_name_the_field(tool_model: Path, body: dict[str, Any], field: str, message: str) -> None:
    async with tool_server(tool_model, "no") as (frontend, _, _script):
        reply = await frontend.http.post("/generate", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert message in error["message"]
