"""The in-process engine generates what a cluster generates; requests are added, finish and fail one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearch, LLMEngine, RequestOutput, SamplingParams, StructuredOutput
from quire.rl import logprobs_from_logits
from quire.shared.errors import FailedPrecondition, InvalidArgument
from tests.services.in_process.engine_parts import engine_core_of

SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 300, "dtype": "float32", "max_num_seqs": 8}
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PROMPTS = ["Once upon a time", "Count: one, two,", "The capital of France is", "x" * 200]


@pytest.fixture(scope="module")
def made() -> Iterator[LLMEngine]:
    with LLMEngine(**SETTINGS) as engine:
        yield engine


@pytest.fixture
def engine(made: LLMEngine) -> Iterator[LLMEngine]:
    yield made
    assert not made.has_unfinished_requests(), "a test left state in the engine"
    core = engine_core_of(made).core
    assert not core.has_work
    assert core.kv.use.used == 0


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until all requests have ended."""
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    return ended


def ask(engine: LLMEngine, prompt: Any, **sampling: Any) -> RequestOutput:
    engine.add_request("alone", prompt, SamplingParams(**({"max_tokens": 24, "temperature": 0} | sampling)))
    return run(engine)["alone"]


@pytest.mark.slow
def test_the_engine_generates_the_text_of_a_cluster(engine: LLMEngine) -> None:
    seeded = SamplingParams(max_tokens=24, seed=5, n=2, logprobs=2)
    with LLM(**SETTINGS) as llm:
        wanted = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, seeded)
    for number, prompt in enumerate(PROMPTS * 2):
        engine.add_request(str(number), prompt, GREEDY if number < len(PROMPTS) else seeded)
    found = run(engine)
    for number, one in enumerate(wanted):
        assert found[str(number)].outputs == one.outputs
        assert found[str(number)].prompt_tokens == one.prompt_tokens


def test_outputs_grow_with_each_step_and_new_requests_join_the_batch(engine: LLMEngine) -> None:
    engine.add_request("first", PROMPTS[0], GREEDY)
    lengths = []
    for number in range(5):
        (output,) = engine.step()
        lengths.append(len(output.outputs[0].token_ids))
        if number == 2:
            engine.add_request("second", PROMPTS[1], GREEDY)
            break
    assert lengths == [1, 2, 3]
    assert engine.get_num_unfinished_requests() == 2
    assert {output.request_id for output in engine.step()} == {"first", "second"}
    ended = run(engine)
    assert ended["first"].outputs == ask(engine, PROMPTS[0]).outputs
    assert ended["second"].outputs == ask(engine, PROMPTS[1]).outputs


def test_an_aborted_request_ends_and_others_continue(engine: LLMEngine) -> None:
    whole = ask(engine, PROMPTS[0]).text
    for name in ("stays", "goes"):
        engine.add_request(name, PROMPTS[0], GREEDY)
    engine.step()
    engine.abort_request(["goes", "nobody"])
    ended = run(engine)
    assert [*ended] == ["stays"]
    assert ended["stays"].text == whole


def test_stop_strings_samples_and_searches(engine: LLMEngine) -> None:
    whole = ask(engine, PROMPTS[0])
    word = whole.text.split()[2]
    stopped = ask(engine, PROMPTS[0], stop=[word])
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", word)
    assert stopped.text == whole.text[: whole.text.index(word)]
    several = ask(engine, PROMPTS[1], n=3, temperature=1, seed=2)
    assert len({output.text for output in several.outputs}) > 1
    search = ask(engine, PROMPTS[1], n=2, beam_search=BeamSearch(width=3), max_tokens=6)
    assert [output.score is not None for output in search.outputs] == [True, True]


def test_constrained_output_and_its_errors(engine: LLMEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = ask(engine, PROMPTS[0], structured_output=StructuredOutput(json=schema))
    assert json.loads(answer.text)["a"] in (1, 2)
    with pytest.raises(InvalidArgument):
        ask(engine, PROMPTS[0], structured_output=StructuredOutput(regex="(("))


def test_a_prefix_is_computed_once(engine: LLMEngine) -> None:
    prompt = "A long beginning that several prompts have in common. " * 4
    first, second = ask(engine, prompt + "one"), ask(engine, prompt + "two")
    assert first.cached_tokens < 16 <= second.cached_tokens


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [("", {}, "prompt"), ("x", {"n": 0}, "n"), ([1, 10**6], {}, "prompt"), ("x " * 9000, {}, "prompt")],
)
def test_an_invalid_request_leaves_no_state(
    engine: LLMEngine, prompt: Any, sampling: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        ask(engine, prompt, **sampling)
    assert error.value.field == field


def test_a_request_id_is_in_use_until_its_request_ends(engine: LLMEngine) -> None:
    engine.add_request("one", PROMPTS[0], GREEDY)
    with pytest.raises(InvalidArgument, match="request_id"):
        engine.add_request("one", PROMPTS[1], GREEDY)
    assert [*run(engine)] == ["one"]


def test_requests_beyond_the_kv_blocks_wait_and_all_finish(engine: LLMEngine) -> None:
    """There are fewer blocks than the requests need at once: some are preempted or wait."""
    long = "word " * 400
    for number in range(12):
        engine.add_request(str(number), f"{number} {long}", SamplingParams(max_tokens=40, temperature=0))
    ended = run(engine)
    assert sorted(ended, key=int) == [str(number) for number in range(12)]
    assert ended["3"].outputs == ask(engine, f"3 {long}", max_tokens=40).outputs


@pytest.mark.parametrize(
    "wrong", [{"num_bloks": 3}, {"kv_offloading_size": 1.0}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}]
)
def test_unsupported_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        LLMEngine(**wrong)


def test_a_named_grammar_library_reports_unsupported_features() -> None:
    with LLMEngine(**SETTINGS, structured_output_backend="outlines-core") as engine:
        answer = ask(engine, PROMPTS[0], structured_output=StructuredOutput(regex="[0-9]{3}"))
        assert len(answer.outputs[0].text) == 3
        assert answer.outputs[0].text.isdigit()
        with pytest.raises(InvalidArgument, match="structured_output_backend: outlines-core takes no grammar"):
            ask(engine, PROMPTS[0], structured_output=StructuredOutput(grammar='root ::= "x"'))


def test_a_batch_is_generated_in_one_call(engine: LLMEngine) -> None:
    alone = [ask(engine, prompt).outputs for prompt in PROMPTS]
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.outputs for output in outputs] == alone
    (one,) = engine.generate({"prompt": PROMPTS[0]}, GREEDY)
    assert one.outputs == alone[0]
    assert engine.generate([], GREEDY) == []


def test_a_batch_fails_as_a_whole_and_leaves_no_state(engine: LLMEngine) -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        engine.generate(PROMPTS, [GREEDY, GREEDY, GREEDY, SamplingParams(temperature=-1)])
    with pytest.raises(InvalidArgument, match="params: must have one entry for each of 4 prompts, got 1"):
        engine.generate(PROMPTS, [GREEDY])
    engine.add_request("other", PROMPTS[0], GREEDY)
    with pytest.raises(FailedPrecondition, match="1 requests added before are unfinished"):
        engine.generate(PROMPTS, GREEDY)
    assert run(engine)["other"].finished


@pytest.mark.parametrize("flat", [False, True])
def test_log_probabilities_of_a_rollout_are_those_of_its_tokens(engine: LLMEngine, flat: bool) -> None:
    params = SamplingParams(max_tokens=9, seed=3, n=2, logprobs=2, flat_logprobs=flat)
    (output,) = engine.generate(PROMPTS[:1], params)
    for sample in output.outputs:
        assert sample.logprobs is not None
        assert sample.rollout_log_probs == [each.logprob for each in sample.logprobs]
        assert [each.token_id for each in sample.logprobs] == sample.token_ids
    (without,) = engine.generate(PROMPTS[:1], GREEDY)
    with pytest.raises(InvalidArgument, match="requires a request with SamplingParams"):
        _ = without.outputs[0].rollout_log_probs


def test_a_trainers_log_probabilities_are_those_of_a_softmax() -> None:
    logits = torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    found = logprobs_from_logits(logits, labels)
    wanted = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients)
