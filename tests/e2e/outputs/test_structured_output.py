"""Constrained answers of the bundled model over every API: all of them match the constraint."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import openai
import pytest

from quire import LLM, SamplingParams, StructuredOutput
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import InvalidArgument
from tests.e2e.conftest import running_cluster
from tests.e2e.observability.test_metrics import page
from tools.evals.json_object import FRAMES

TYPES = {"string": str, "integer": int, "boolean": bool}


def question(seed: int) -> tuple[str, dict[str, Any]]:
    """A text to fill a form from, and the form's schema."""
    rng = Random(seed)
    frame = rng.choice(FRAMES)
    fields = [field for field in frame.fields if field.kind in TYPES]
    values = {field.slot: field.spell(field.value(rng)) for field in frame.fields}
    sentence = rng.choice(frame.sentences).format(**values)
    bound = {"string": {"maxLength": 24}, "integer": {"minimum": 0, "maximum": 999}}  # max_tokens ends nothing early
    properties = {rng.choice(field.keys): {"type": field.kind, **bound.get(field.kind, {})} for field in fields}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return f"Read: {sentence}\nFill in {', '.join(properties)} as JSON.", schema


def assert_fits(text: str, schema: dict[str, Any]) -> None:
    found = json.loads(text)
    assert found.keys() == schema["properties"].keys(), text
    for name, value in found.items():
        assert type(value) is TYPES[schema["properties"][name]["type"]], text


def chat(openai_client: openai.OpenAI, content: str, **arguments: Any) -> Any:
    return openai_client.chat.completions.create(
        model="quire-tiny", messages=[{"role": "user", "content": content}], max_tokens=200, **arguments
    )


@pytest.fixture
def openai_client(cluster: Cluster) -> Any:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:
        yield client


def test_every_schema_is_kept_to_by_many_at_a_time(openai_client: openai.OpenAI) -> None:
    def ask(seed: int) -> None:
        content, schema = question(seed)
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        answer = chat(openai_client, content, response_format=form, temperature=1.0, seed=seed).choices[0]
        assert answer.finish_reason == "stop"
        assert_fits(answer.message.content, schema)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(48)))


def test_samples_of_one_prompt_share_a_grammar_and_differ(openai_client: openai.OpenAI) -> None:
    _, schema = question(3)
    answer = chat(
        openai_client,
        "Who are you?",
        n=6,
        temperature=2.0,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        extra_body={"structured_outputs": {"json": schema}},
    )
    for choice in answer.choices:
        assert_fits(choice.message.content, schema)
        said = b"".join(bytes(entry.bytes or b"") for entry in choice.logprobs.content)
        assert said.decode().removesuffix("<|im_end|>").removesuffix("<|endoftext|>") == choice.message.content
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_other_forms(openai_client: openai.OpenAI) -> None:
    def ask(**outputs: Any) -> str:
        extra = {"structured_outputs": outputs}
        return chat(openai_client, "Who are you?", temperature=1.0, seed=1, extra_body=extra).choices[0].message.content

    assert re.fullmatch(r"\d{3}-\d{4}", ask(regex=r"\d{3}-\d{4}"))
    assert ask(choice=["red", "green"]) in ("red", "green")
    assert re.fullmatch(r"\(*x\)*", ask(grammar='root ::= "(" root ")" | "x"'))
    assert re.fullmatch("<[a-z]{2,6}>", ask(grammar='start: "<" NAME ">"\nNAME: /[a-z]{2,6}/'))
    for form in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ):
        content, _ = question(2)
        assert isinstance(
            json.loads(chat(openai_client, content, temperature=0, **form).choices[0].message.content), dict
        )


def test_structural_tags(openai_client: openai.OpenAI) -> None:
    """Free text around a form whose markers are single tokens."""
    city = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
    arguments = {"type": "object", **city}
    begin = '<tool_call>\n{"name": "weather", "arguments": '
    tag = {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": arguments},
        "end": "}\n</tool_call>",
    }
    form = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [tag],
        "at_least_one": True,
        "stop_after_first": True,
    }
    for seed in range(3):
        answer = chat(
            openai_client,
            "How is the weather?",
            seed=seed,
            temperature=0.5,
            extra_body={"response_format": {"type": "structural_tag", "format": form}},
        )
        if answer.choices[0].finish_reason == "stop":
            text = answer.choices[0].message.content
            assert json.loads(text[text.index("\n") : text.rindex("}") + 1])["arguments"]["city"] in ("Oslo", "Rome")
    only = {"type": "structural_tag", "format": tag}
    answer = chat(openai_client, "Hi", temperature=1.5, seed=1, extra_body={"response_format": only}).choices[0]
    assert (
        json.loads(answer.message.content.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "weather"
    )
    assert answer.finish_reason == "stop"


def test_a_stream_and_a_stop_string(openai_client: openai.OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[a-m]+;[n-z]+"}}
    stream = chat(openai_client, "Letters?", stream=True, temperature=1.0, stop=";", extra_body=form)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert re.fullmatch("[a-m]+", text)


def test_from_python(cluster: Cluster) -> None:
    content, schema = question(11)
    params = SamplingParams(max_tokens=200, seed=1, structured_output=StructuredOutput(json=schema))
    with LLM(address=cluster.grpc_address) as llm:
        assert_fits(llm.chat([{"role": "user", "content": content}], params)[0].text, schema)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format of type json_schema needs json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs must have exactly one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "got json, regex."),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "send one of them"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"json_object": False}}, "json_object must be true"),
        ({"structured_outputs": {"choice": []}}, "choice must have at least one option"),
        ({"structured_outputs": {"json": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
    ],
)
def test_wrong_forms_are_refused_at_the_door(cluster: Cluster, body: dict[str, Any], text: str) -> None:
    answer = httpx.post(f"http://{cluster.http_address}/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_python_reports_invalid_constraints(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="exactly one constraint, got json, regex"):
        StructuredOutput(json={}, regex="a").to_proto()
    with pytest.raises(InvalidArgument, match="no text satisfies it: # is false"):
        client.generate("x", SamplingParams(structured_output=StructuredOutput(json=False)))


@pytest.mark.slow
def test_preemption_chunks_and_several_frontends_change_nothing(cluster: Cluster) -> None:
    """A worker with little memory and small steps, with two frontends, returns the output of a roomy one."""

    def ask(address: str, seed: int) -> list[str]:
        content, schema = question(seed)
        long = f"{' '.join(question(seed + k)[0] for k in range(1, 6))} {content}"
        form = StructuredOutput(json={"type": "array", "items": schema, "minItems": 3, "maxItems": 3})
        params = SamplingParams(n=2, temperature=0.9, seed=seed, max_tokens=300, logprobs=1, structured_output=form)
        with Client(address) as client:
            outputs = client.chat([{"role": "user", "content": long}], params)[0].outputs
        for output in outputs:
            for filled in json.loads(output.text):
                assert_fits(json.dumps(filled), schema)
        return [output.text for output in outputs]

    def ask_all(addresses: list[str]) -> list[list[str]]:
        with ThreadPoolExecutor(12) as pool:
            return list(pool.map(lambda seed: ask(addresses[seed % len(addresses)], seed), range(12)))

    worker = {"num_blocks": 90, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    with running_cluster(frontends=2, worker=worker, scheduler={"watermark": 0.0}) as tight:
        frontends = [process.addresses["grpc"] for process in tight.processes if process.spec.role == "frontend"]
        with Client(frontends[0]) as client:  # after short answers only, the scheduler admits more than fit
            client.generate(["x"] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
        crowded = ask_all(frontends)
        scheduler = page(next(p for p in tight.processes if p.spec.role == "scheduler").addresses["metrics"])
    assert crowded == ask_all([cluster.grpc_address])
    assert len(frontends) == 2
    assert scheduler["vllm:num_preemptions_total"] > 0


def test_metrics_count_compilation_and_masks() -> None:
    with running_cluster(worker={"num_blocks": 200}) as own, Client(own.grpc_address) as client:
        for pattern in ("a{3}", "b{4}", "a{3}"):
            client.generate("x", SamplingParams(structured_output=StructuredOutput(regex=pattern), max_tokens=8))
        worker = page(next(p for p in own.processes if p.spec.role == "worker").addresses["metrics"])
    assert worker["quire_worker_grammar_compile_seconds_count"] == 2
    assert worker["quire_worker_grammars_prepared_total"] == 2, "the scheduler knows that the third is there"
    assert worker["quire_worker_mask_fill_seconds_count"] >= 10
    assert worker["quire_worker_mask_wait_seconds_count"] >= 10
