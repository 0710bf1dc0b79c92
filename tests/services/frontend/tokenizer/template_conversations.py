"""Conversations as clients send them, the words that a template must show, and transformers' rendering of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from quire.services.frontend.openai_edge.body.prompts import read_message
from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import PromptRenderer, RendererConfig
from quire.shared.errors import InvalidArgument
from tests.services.frontend.tiny_folder import byte_level_tokenizer

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# None, or Python's repr of a value
FAULT = re.compile(r"\bNone\b|\{'\w+': |[\"']type[\"']: ?[\"'](?:text|thinking)[\"']")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ClientConversation:
    """Messages and tools of a body, and the words in them that a template could show."""

    messages: Messages
    words: tuple[str, ...]
    thoughts: tuple[str, ...] = ()  # words of reasoning, which templates may omit from earlier turns
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    place = {"type": "string", "description": "A city."}
    parameters = {"type": "object", "properties": {"city": place}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Tells it.", "parameters": parameters}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ID, OTHER = "call_PTLP8xhu3uwZk4l3nlnrrJha", "call_9Xb2mQe7LrT0yVw5sKd1aZcN"
TOOLS = (tool("get_weather"), tool("get_time"))
ASK, THANKS, SAID = (
    turn("user", "Weather in Oslo?"),
    turn("user", "Thanks, and Bergen?"),
    turn("assistant", "Five degrees."),
)
OSLO = call(ID, "get_weather", '{"city": "Oslofjord"}')
TIME = call(OTHER, "get_time", '{"city": "Tromsdal"}')
FIVE, NOON = turn("tool", "rain_at_five", tool_call_id=ID), turn("tool", "noon_sharp", tool_call_id=OTHER)
SHOWN = ("Weather in Oslo?", "get_weather", "Oslofjord", "rain_at_five")


def looped(content: Any, *calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return turn("assistant", content, tool_calls=list(calls or (OSLO,)), **more)


def loop(content: Any, *results: Mapping[str, Any], **more: Any) -> Messages:
    return [ASK, looped(content, **more), *(results or (FIVE,))]


NESTED = call(ID, "get_weather", {"city": "Oslofjord", "days": [1, 2], "unit": {"name": "Ångström"}})
CONVERSATIONS: Mapping[str, ClientConversation] = {
    "user": ClientConversation([ASK], ("Weather in Oslo?",)),
    "system": ClientConversation([turn("system", "Be brief."), ASK], ("Be brief.", "Weather in Oslo?")),
    "answers": ClientConversation([ASK, SAID, THANKS], ("Weather in Oslo?", "Five degrees.", "Thanks, and Bergen?")),
    "tools offered": ClientConversation(
        [turn("system", "Be brief."), ASK], ("Be brief.", "Weather in Oslo?"), tools=TOOLS
    ),
    "call, null": ClientConversation(loop(None), SHOWN, tools=TOOLS),
    "call, empty": ClientConversation(loop(""), SHOWN, tools=TOOLS),
    "call, absent": ClientConversation([ASK, {"role": "assistant", "tool_calls": [OSLO]}, FIVE], SHOWN, tools=TOOLS),
    "call, text": ClientConversation(loop("Let me look."), (*SHOWN, "Let me look."), tools=TOOLS),
    "call, answered": ClientConversation(
        [*loop(None), SAID, THANKS], (*SHOWN, "Five degrees.", "Thanks, and Bergen?"), tools=TOOLS
    ),
    "call, object": ClientConversation([ASK, looped(None, NESTED), FIVE], (*SHOWN, "ngstr"), tools=TOOLS),
    "call, no json": ClientConversation(
        [ASK, looped(None, call(ID, "get_weather", '{"city": "Oslofjord')), FIVE], SHOWN, tools=TOOLS
    ),
    "two calls": ClientConversation(
        [ASK, looped(None, OSLO, TIME), FIVE, NOON], (*SHOWN, "get_time", "Tromsdal", "noon_sharp"), tools=TOOLS
    ),
    "calls in turn": ClientConversation(
        [*loop(None), looped(None, TIME), NOON, SAID, THANKS],
        (*SHOWN, "get_time", "Tromsdal", "noon_sharp", "Five degrees."),
        tools=TOOLS,
    ),
    "thought, call": ClientConversation(loop(None, reasoning_content="look_first"), SHOWN, ("look_first",), TOOLS),
    "thought, text, call": ClientConversation(
        loop("Let me look.", reasoning="look_first"), (*SHOWN, "Let me look."), ("look_first",), TOOLS
    ),
    "thought, answer": ClientConversation(
        [ASK, turn("assistant", "Five degrees.", thinking="look_first"), THANKS],
        ("Five degrees.", "Thanks, and Bergen?"),
        ("look_first",),
    ),
    "developer": ClientConversation([turn("developer", "Be brief."), ASK], ("Be brief.", "Weather in Oslo?")),
    "system, developer": ClientConversation(
        [turn("system", "Be kind."), turn("developer", "Be brief."), ASK], ("Be kind.", "Be brief.", "Weather in Oslo?")
    ),
    "two systems": ClientConversation(
        [turn("system", "Be kind."), turn("system", "Be brief."), ASK], ("Be kind.", "Be brief.", "Weather in Oslo?")
    ),
    "late system": ClientConversation(
        [turn("system", "Be kind."), ASK, SAID, turn("system", "Be brief."), THANKS],
        ("Be kind.", "Be brief.", "Weather in Oslo?", "Five degrees.", "Thanks, and Bergen?"),
    ),
    "parts": ClientConversation(
        [ASK, SAID, turn("user", parts("And Bergen?", "Or Voss?"))], ("And Bergen?", "Or Voss?", "Five degrees.")
    ),
    "result in parts": ClientConversation(
        loop(None, turn("tool", parts("rain_at_five"), tool_call_id=ID)), SHOWN, tools=TOOLS
    ),
    # theia#17104, mini-swe-agent#759: refused by templates in which roles alternate
    "user after result": ClientConversation([*loop(None), THANKS], (*SHOWN, "Thanks, and Bergen?"), tools=TOOLS),
    # raycast-openai-translator#34
    "system, users in a row": ClientConversation(
        [turn("system", "Translate."), ASK, turn("user", "<5984>Quickly!")],
        ("Translate.", "Weather in Oslo?", "<5984>Quickly!"),
    ),
    "users in a row": ClientConversation([ASK, turn("user", "Quickly!")], ("Weather in Oslo?", "Quickly!")),
}


def renderer_of(source: str) -> PromptRenderer:
    return PromptRenderer(RendererConfig(source, None, {}, "it", VARIABLES))


def render(made: PromptRenderer, sent: ClientConversation) -> str:
    """Returns our rendering, as for /v1/chat/completions; raises InvalidArgument."""
    messages = [read_message(message) for message in sent.messages]
    prompt = ChatPrompt(
        messages, add_generation_prompt=sent.add_generation_prompt, tools=sent.tools, template_variables=sent.variables
    )
    return made.sections(prompt)[0].text


@lru_cache
def _reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **VARIABLES)


def render_with_transformers(source: str, sent: ClientConversation, *, as_text: bool) -> str | None:
    """Returns transformers' rendering, with arguments as an object or as JSON text; None if the template refuses it."""
    messages = [_with_arguments(message, as_text) for message in sent.messages]
    try:
        text = _reference().apply_chat_template(
            messages,
            tools=list(sent.tools) or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=sent.add_generation_prompt,
            **sent.variables,
        )
    except Exception:  # templates raise arbitrary exceptions
        return None
    return str(text)


def _with_arguments(message: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for one in message["tool_calls"]:
        arguments = one["function"]["arguments"]
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {"INVALID_JSON": arguments}
        calls.append({**one, "function": {**one["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def missing(source: str, sent: ClientConversation, text: str) -> list[str]:
    """Returns the words that are not shown, and the faults in the text."""
    around = (
        render_with_transformers(source, ClientConversation([turn("user", "?")], (), tools=sent.tools), as_text=False)
        or ""
    )
    shown = [word for word in sent.words if text.count(word) <= around.count(word)]
    return shown + FAULT.findall(text)[len(FAULT.findall(around)) :]


def refused(made: PromptRenderer, sent: ClientConversation) -> str:
    try:
        render(made, sent)
    except InvalidArgument as error:
        return error.message
    return ""
