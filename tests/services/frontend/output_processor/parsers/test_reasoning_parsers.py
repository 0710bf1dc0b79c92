"""Tests of every reasoning parser: its result is the same for every split of the answer."""

from __future__ import annotations

import pytest

from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from tests.services.frontend.output_processor.parsers.reading import pieces, reasoning_in

THINK = "<think>\nIt is\n\nso.\n</think>\n\nYes.\n"
R, C = Reasoning, Content
ANSWERS: list[tuple[str, str, list[Event]]] = [
    *(
        (name, THINK, [R("It is\n\nso."), C("Yes.\n")])
        for name, file in registry.REASONING_PARSERS.items()
        if file in ("think", "kimi_k2", "hunyuan_a13b", "ernie45")
    ),
    ("qwen3", "Yes <think>no</think>", [C("Yes <think>no</think>")]),
    ("qwen3", " \n<think></think>Yes.", [C("Yes.")]),
    ("qwen3", "  Yes.", [C("  Yes.")]),
    ("qwen3", "<think>never </thin", [R("never </thin")]),
    ("qwen3", "<thin", [C("<thin")]),
    ("hunyuan_a13b", "<think>\nA\n</think>\n<answer>\nYes.\n</answer>", [R("A"), C("Yes.")]),
    ("ernie45", "<think>\nA\n</think>\n\n<response>\nYes.\n</response>\n", [R("A"), C("Yes.")]),
    ("mistral", "[THINK]A[/THINK]Yes.", [R("A"), C("Yes.")]),
    ("seed_oss", "<seed:think>A</seed:think>\nYes.", [R("A"), C("Yes.")]),
    ("granite", "Here is my thought process: A. Here is my response: Yes.", [R("A."), C("Yes.")]),
    ("granite", "Here's my thought process:\nA\nHere's my response:\nYes.", [R("A"), C("Yes.")]),
    ("granite", "Here is my cat.", [C("Here is my cat.")]),
    (
        "cohere_command3",
        "<|START_THINKING|>A<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        [R("A"), C("Yes.")],
    ),
    (
        "cohere_command3",
        "<|START_THINKING|>A<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>",
        [R("A"), C("<|START_ACTION|>[]<|END_ACTION|>")],
    ),
    # vllm's test_minimax_m3_reasoning_parser: a lone end before an answer, and within one
    (
        "muse_glimmer",
        " to=self<|message|>A<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        [R("A"), C("Yes.")],
    ),
    ("minimax_m3", "<mm:think>A</mm:think>Yes.", [R("A"), C("Yes.")]),
    ("minimax_m3", "</mm:think>Yes.", [C("Yes.")]),
    ("minimax_m3", "Yes</mm:think>.", [C("Yes</mm:think>.")]),
    ("hy_v3", "<think:opensource>A</think:opensource>Yes.", [R("A"), C("Yes.")]),
    ("hy_v3", "<think>A</think>Yes.", [R("A"), C("Yes.")]),
    (
        "kimi_k3",
        "<|open|>think<|sep|>A<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|open|>x",
        [R("A"), C("Yes.<|open|>x")],
    ),
    ("kimi_k3", "Yes.<|close|>response<|sep|>", [C("Yes.")]),
    (  # llama.cpp#26185, pwilkin/llama.cpp PR 20: the message has an end tag as well
        "kimi_k3",
        "<|open|>think<|sep|>A<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        [R("A"), C("Yes.")],
    ),
    (
        "solar_open",
        "<|think|>A<|end|><|begin|>assistant<|content|>Yes.<|end|>",
        [R("A"), C("Yes.")],
    ),
    ("solar_open", "<|content|>Yes.", [C("Yes.")]),
    (
        "apriel",
        "Here are my reasoning steps:\nA\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]\n<|x|>",
        [R("A"), C("Yes.<|x|>")],
    ),
    ("apriel", "Yes.\n[END FINAL RESPONSE]", [C("Yes.")]),
    ("gemma4", "<|channel>thought\nA\n<channel|>Yes.", [R("A"), C("Yes.")]),
    (
        "openai_gptoss",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [R("A"), C("Yes.")],
    ),
    (
        "openai_gptoss",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|x|>" }<|call|>',
        [R("A"), C("First."), CallStart("f"), CallArguments('{"a": "<|x|>"}')],
    ),
    # openai/harmony#60: another word after <|constrain|>
    ("openai_gptoss", "<|channel|>final <|constrain|>response<|message|>Hello<|return|>", [C("Hello")]),
    # llama.cpp#27720: a header without a message
    (
        "openai_gptoss",
        "<|channel|>?? <|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        [R("hm"), C("Hi")],
    ),
    ("openai_gptoss", "No channel. <|channel|>odd one<|message|>x", [C("No channel.\nx")]),
]


@pytest.mark.parametrize(("parser", "text", "expected"), ANSWERS)
def test_reasoning_is_found_whole_or_cut_anywhere(parser: str, text: str, expected: list[Event]) -> None:
    assert reasoning_in(parser, [text]) == expected
    assert reasoning_in(parser, list(text)) == expected
    assert all(reasoning_in(parser, pieces(text, [cut])) == expected for cut in range(1, len(text)))


def test_the_prompt_may_begin_the_reasoning() -> None:
    for text in ("A</think>Yes.", "<think>A</think>Yes.", "\nA\n</think>\n\nYes."):
        assert reasoning_in("deepseek_r1", [text], is_open=True) == [R("A"), C("Yes.")]
    assert reasoning_in("deepseek_r1", ["</think>Yes."], is_open=True) == [C("Yes.")]
    assert reasoning_in("deepseek_r1", ["A</think>Yes."]) == [C("A</think>Yes.")]


def test_apriels_prompt_begins_the_reasoning() -> None:
    text = "It is so.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]"
    assert reasoning_in("apriel", [text], is_open=True) == [R("It is so."), C("Yes.")]


def test_every_parser_has_an_answer_here() -> None:
    assert {parser for parser, _, _ in ANSWERS} == set(registry.REASONING_PARSERS)
