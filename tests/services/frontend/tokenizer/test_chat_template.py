"""Tests of templates: their sources, their functions, and the limits of the sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.shared.errors import InvalidArgument
from tests.services.frontend.tiny_folder import CHATML

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    template = ChatTemplate(source, {"eos_token": "<end>"})
    return template.render(messages, add_generation_prompt=True, continue_final_message=False, variables=variables)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token + messages[0].content }}", "hello"),  # nobodywho#61
        ("{{ messages[0].content + eos_token }}", "hello"),
        ("{% set c = bos_token + '[' %}{{ c }}{{ bos_token }}", "["),
        ("{{ bos_token | default('<s>') }}{{ 'x' if bos_token else 'none' }}", "none"),
    ],
)
def test_tokens_outside_the_vocabulary_have_no_text(source: str, text: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render(HELLO, add_generation_prompt=True, continue_final_message=False, variables={}) == text


def test_last_message_stays_open() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    template = ChatTemplate(CHATML, {})
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True, variables={})
    assert text.endswith("<|im_start|>assistant\nSure,")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ eos_token }}", "<end>"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}x{{ messages[0].content }}{% endgeneration %}", "xhello"),
        ("{{ flag }}", "on"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_functions_that_templates_use(source: str, text: str) -> None:
    assert render(source, flag="on") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_refusals_and_forbidden_accesses_of_templates_are_request_errors(source: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        render(source)
    assert refusal.value.field == "messages"


def test_the_templates_message_reaches_the_client() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_missing_template_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        ChatTemplate(None, {}).render(HELLO, add_generation_prompt=True, continue_final_message=False, variables={})


def test_a_broken_template_is_a_start_up_error() -> None:
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate("{% for %}", {})
