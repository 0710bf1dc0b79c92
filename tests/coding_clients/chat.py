"""Reading of /v1/chat/completions answers as the AI SDK, Cline and aider do it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.coding_clients.events import DONE, Answered, Call

REASONS = ("stop", "length", "tool_calls")


def read_stream(events: list[dict[str, Any]]) -> Answered:
    assert events.pop()["type"] == DONE
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        _add(message, choice["delta"])
    usage = events[-1].get("usage")
    assert usage is not None, "asked for with stream_options"
    return _answered(message, choices[-1]["finish_reason"], usage)


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    message["reasoning_content"] += delta.get("reasoning_content") or ""
    for piece in delta.get("tool_calls") or ():
        if piece["index"] == len(message["tool_calls"]):
            assert piece["type"] == "function"
            call = {"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}}
            message["tool_calls"].append(call)
        function = message["tool_calls"][piece["index"]]["function"]
        function["name"] += piece["function"].get("name") or ""
        function["arguments"] += piece["function"].get("arguments") or ""


def read_whole(answer: dict[str, Any]) -> Answered:
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    return _answered(choice["message"], choice["finish_reason"], answer["usage"])


def _answered(message: dict[str, Any], reason: str, usage: dict[str, Any]) -> Answered:
    assert reason in REASONS
    calls = message.get("tool_calls") or []
    answered = Answered(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content") or "",
        calls=[Call(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
        is_cut=reason == "length",
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )
    answered.check()
    assert answered.is_cut or (reason == "tool_calls") == bool(calls)
    answered.spliced = [_sent_back(answered, calls)]
    return answered


def _sent_back(answered: Answered, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that the AI SDK sends back: without empty fields, and with null content if there are
    calls."""
    message: dict[str, Any] = {"role": "assistant", "content": answered.text or (None if calls else "")}
    if answered.reasoning:
        message["reasoning_content"] = answered.reasoning
    return {**message, "tool_calls": calls} if calls else message


def results(answered: Answered, texts: Iterator[Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, **next(texts)} for call in answered.calls]
