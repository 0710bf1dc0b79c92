"""Conversion of `prompt` and `messages` of a body to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.openai_edge.body.bodies import ChatOptions, InputBody, TokenizeBody
from quire.services.frontend.openai_edge.body.field_schemas import ROLES
from quire.services.frontend.openai_edge.body.media_parts import read_media_part
from quire.services.frontend.request import conversation
from quire.services.frontend.request.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quire.services.frontend.request.tool_offer import INPUT
from quire.shared.errors import InvalidArgument

BEGINNING = ("prefix", "partial")  # names of the field in DeepSeek's and Mistral's, and in Kimi's and Qwen's APIs
REASONING = ("reasoning", "reasoning_content", "thinking")
THOUGHTS = ("thinking", "reasoning")  # types of parts with reasoning
TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}  # type of a part -> key of its text


def completion_prompts(prompt: Any, *, add_special_tokens: bool) -> list[Prompt]:
    """Returns the prompts of a text, token ids, or a list in which each entry is one or the other."""
    if isinstance(prompt, list) and not _is_token_ids(prompt):
        return [_one(entry, add_special_tokens) for entry in prompt]
    return [_one(prompt, add_special_tokens)]


def _one(prompt: Any, add_special_tokens: bool) -> Prompt:
    """Converts one prompt, a text or a list of token ids; raises InvalidArgument for everything else."""
    if isinstance(prompt, str):
        return TextPrompt(prompt, add_special_tokens)
    if isinstance(prompt, list) and _is_token_ids(prompt):
        return TokenPrompt(prompt)
    raise InvalidArgument("prompt must be text, token ids, or a list of either", field="prompt")


def _is_token_ids(value: Sequence[Any]) -> bool:
    """Returns whether the value is a list of token ids; also for the empty list, one empty prompt, which is refused
    later."""
    return set(map(type, value)) <= {int}


def chat_prompt(
    body: ChatOptions | TokenizeBody | InputBody,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> ChatPrompt:
    """Builds a chat prompt. An assistant's message at the end that is marked as begun is continued, without a
    generation prompt."""
    continues = body.continue_final_message or _is_begun(messages)
    return conversation.chat_prompt(
        [read_message(message) for message in messages],
        add_generation_prompt=body.add_generation_prompt and not continues,
        continue_final_message=continues,
        template_variables={**variables, **(body.chat_template_kwargs or {})},
        add_special_tokens=bool(body.add_special_tokens),
        tools=tools,
        template=body.chat_template or "",
    )


def _is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the last message is marked as the beginning of the answer."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and any(last.get(name) is True for name in BEGINNING)


def read_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message of a body in the form of chat templates; raises InvalidArgument or Unimplemented."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgument(f"messages: role must be one of {', '.join(ROLES)}, got {role!r:.64}", field="messages")
    thoughts, content = _parted(message.get("content")) if role == "assistant" else ("", message.get("content"))
    return conversation.message(
        "tool" if role == "function" else str(role),
        _content(content),
        name=message.get("name"),
        tool_calls=[_tool_call(call) for call in _calls(message)],
        tool_call_id=message.get("tool_call_id"),
        reasoning=_reasoning(message) or thoughts,
    )


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """Returns the calls of a message, also one in the deprecated field function_call."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidArgument("messages: tool_calls must be a list", field="messages")
    legacy_call = message.get("function_call")
    return calls or ([{"function": legacy_call}] if legacy_call is not None else [])


def _parted(content: Any) -> tuple[str, Any]:
    """Returns the reasoning among the parts of a content, as Mistral's clients send it, and the other parts."""
    if not isinstance(content, list):
        return "", content
    thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in THOUGHTS]
    return "\n".join(map(_thought, thoughts)), [part for part in content if part not in thoughts]


def _thought(part: Mapping[str, Any]) -> str:
    """Returns the text of a part of reasoning, which is under its type's name or `text`, as a text or as parts.
    Raises InvalidArgument if neither holds one."""
    text = part.get(str(part["type"])) or part.get("text") or ""
    if isinstance(text, list):
        text = "".join(_part(inner) for inner in text)
    if not isinstance(text, str):
        raise InvalidArgument(f"messages: content of type {part['type']!r} needs its text", field="messages")
    return text


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """Returns the first non-empty reasoning under any of the names that clients use; None without one."""
    for name in REASONING:
        if isinstance(text := message.get(name), str) and text:
            return text
    return None


def _content(content: Any) -> str | list[Mapping[str, Any]] | None:
    """Normalizes a message's content: text and None stay, parts become parts of type text or pictures. Raises
    InvalidArgument for other values."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument("messages: content must be text or a list of parts", field="messages")
    return [read_media_part(part) or {"type": "text", "text": _part(part)} for part in content]


def _part(part: Any) -> str:
    """Returns the text of one content part; raises InvalidArgument if it has none or its type (an image, audio) is
    not supported."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is not None and isinstance(part.get(key), str):
        return str(part[key])
    if key is not None:
        raise InvalidArgument(f"messages: content of type {kind!r} needs its text in {key!r}", field="messages")
    raise conversation.unsupported_part("messages: parts", kind, "messages")


def _tool_call(call: Any) -> Mapping[str, Any]:
    """Converts a tool call of a message. A custom call's input becomes the argument `input`; missing arguments
    become {}. Raises InvalidArgument for a call without a function or with arguments of another type."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if isinstance(custom, dict):
        if not isinstance(text := custom.get(INPUT), str):
            raise InvalidArgument(f"messages: a custom tool call needs its {INPUT}, a text", field="messages")
        return conversation.tool_call(str(call.get("id") or ""), str(custom.get("name") or ""), {INPUT: text})
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument("messages: a tool call needs a function", field="messages")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise InvalidArgument(
            f"messages: arguments of a tool call must be JSON text or an object, got {type(arguments).__name__}",
            field="messages",
        )
    return conversation.tool_call(str(call.get("id") or ""), str(function.get("name") or ""), arguments or "{}")
