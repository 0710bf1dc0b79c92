"""Turns with tool calls, and the results of those calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from quire.services.frontend.request.conversation import NO_JSON
from quire.services.frontend.tokenizer.message_shapes.contents import (
    REASONING_FIELDS,
    joined,
    media_of,
    reasoning_of,
    text_of,
)
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.shared import strict_json

Message = Mapping[str, Any]
TAG, END_TAG = "<tool_call>", "</tool_call>"
ID_LENGTH = 9
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def apply_shape(turns: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Returns the turns with calls and results in the shape: order, ids, and number of calls per turn as the
    template reads them."""
    if not any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns):
        return [_without_null(turn) for turn in turns]
    turns = _in_order_of_calls(turns)
    if shape.call_ids != "given" or shape.result_names == "function" or shape.parallel_calls == "split":
        turns = _with_ids(turns)
    if shape.call_ids != "given":
        turns = _with_new_ids(turns, shape)
    if shape.parallel_calls == "split":
        turns = _one_call_a_turn(turns)
    names = {call.get("id", ""): call["function"]["name"] for turn in turns for call in turn.get("tool_calls") or ()}
    written: list[Message] = []
    for turn in turns:
        if turn.get("tool_calls"):
            written.extend(_call_turns(turn, shape))
        elif turn["role"] == "tool":
            written.append(_result(turn, names, shape))
        else:
            written.append(_without_null(turn))
    return _gathered(written) if shape.call_text == "gathered" else written


def _gathered(turns: Sequence[Message]) -> list[Message]:
    """Joins the assistant's texts between two user turns into the last one, for templates in which roles alternate."""
    written: list[Message] = []
    earlier: int | None = None  # index of the last text since the last user turn
    for turn in turns:
        if turn["role"] == "user":
            earlier = None
        elif turn["role"] == "assistant" and not turn.get("tool_calls"):
            if earlier is not None:
                before = written.pop(earlier)
                turn = {**before, **turn, "content": joined(before.get("content"), turn.get("content"))}  # noqa: PLW2901
            earlier = len(written)
        written.append(turn)
    return written


def _without_null(turn: Message) -> Message:
    """Gives a turn without calls at least an empty text."""
    return turn if turn.get("content") is not None else {**turn, "content": ""}


def _in_order_of_calls(turns: Sequence[Message]) -> list[Message]:
    """Puts the results of each turn's calls in the order of the calls.

    Clients send results as the tools end, and most templates show no ids, so that the model would read the first result
    as that of the first call.
    """
    written = list(turns)
    for place, turn in enumerate(turns):
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            continue
        results = list(takewhile(lambda other: other["role"] == "tool", turns[place + 1 :]))
        order: dict[str, int] = {}
        for number, call in enumerate(calls):
            order.setdefault(call.get("id") or "", number)
        if all(result.get("tool_call_id") for result in results):
            results.sort(key=lambda result: order.get(result["tool_call_id"], len(order)))
            written[place + 1 : place + 1 + len(results)] = results
    return written


def _with_ids(turns: Sequence[Message]) -> list[Message]:
    """Numbers calls without an id, and gives results without one the id of the next unanswered call."""
    written: list[Message] = []
    count, unanswered = 0, list[str]()
    for turn in turns:
        if calls := turn.get("tool_calls"):
            calls = [
                {**call, "id": call.get("id", "") or f"call_{count + number}"} for number, call in enumerate(calls)
            ]
            count += len(calls)
            unanswered = [call["id"] for call in calls]
            written.append({**turn, "tool_calls": calls})
        elif turn["role"] == "tool":
            call_id = turn.get("tool_call_id") or (unanswered[0] if unanswered else f"call_{count}")
            unanswered = [other for other in unanswered if other != call_id]
            written.append({**turn, "tool_call_id": call_id})
        else:
            written.append(turn)
    return written


def _one_call_a_turn(turns: Sequence[Message]) -> list[Message]:
    """Splits a turn with several calls into one turn per call, each followed by its results; the first keeps text and
    reasoning."""
    written: list[Message] = []
    waiting = list(turns)
    while waiting:
        turn = waiting.pop(0)
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            written.append(turn)
            continue
        count = next((place for place, other in enumerate(waiting) if other["role"] != "tool"), len(waiting))
        results, waiting = waiting[:count], waiting[count:]
        for number, call in enumerate(calls):
            kept = turn if number == 0 else {"role": turn["role"], "content": None}
            written.append({**kept, "tool_calls": [call]})
            written += [result for result in results if result["tool_call_id"] == call["id"]]
        known = {call["id"] for call in calls}
        written += [result for result in results if result["tool_call_id"] not in known]
    return written


def _call_turns(turn: Message, shape: MessageShape) -> Iterator[Message]:
    """Yields a turn with calls in the template's shape: as text, as one turn, or its text and calls as two turns if
    the template does not read them together; reasoning is joined to the text or split from it."""
    if shape.calls != "native":
        yield _as_text(turn, shape)
        return
    calls = [_call(call, shape) for call in turn["tool_calls"]]
    text, reasoning = turn.get("content"), reasoning_of(turn)
    apart = shape.call_text != "together" or (reasoning and shape.call_reasoning == "split")
    bare = {name: value for name, value in turn.items() if name != "content"}
    if text and apart:
        yield {name: value for name, value in turn.items() if name != "tool_calls"}
        bare = {name: value for name, value in bare.items() if name not in REASONING_FIELDS}
        text = None
    elif text and reasoning and shape.call_reasoning == "joined":
        bare |= dict.fromkeys(REASONING_FIELDS, joined(reasoning, text_of(text)))
        text = None
    yield {**bare, **_call_content(text, shape), "tool_calls": calls}


def _call_content(content: Any, shape: MessageShape) -> dict[str, Any]:
    """Returns the field `content` of a turn with calls; an empty one is given as "", as null or left out, as the
    template needs."""
    if content:
        return {"content": content}
    match shape.call_content:
        case "empty":
            return {"content": ""}
        case "null":
            return {"content": None}
        case "given" if content is not None:
            return {"content": ""}
    return {}


def _as_text(turn: Message, shape: MessageShape) -> Message:
    """Returns the turn with its calls written as JSON lines after the text, between tags if the shape says so."""
    lines = [
        json.dumps({"name": call["function"]["name"], "arguments": arguments_object(call)}, ensure_ascii=False)
        for call in turn["tool_calls"]
    ]
    if shape.calls == "tagged":
        lines = [f"{TAG}\n{line}\n{END_TAG}" for line in lines]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [text_of(turn.get("content"))]), *lines])}


def _call(call: Mapping[str, Any], shape: MessageShape) -> Mapping[str, Any]:
    """Returns the call with its arguments as JSON text, as an object, or as an object of texts only."""
    arguments: Any = arguments_text(call) if shape.arguments == "text" else arguments_object(call)
    if shape.arguments == "flat":
        arguments = {name: _flat(value) for name, value in arguments.items()}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def arguments_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object; text that is not a JSON object becomes a member named NO_JSON."""
    given = call["function"]["arguments"]
    for _ in range(2):  # some clients encode twice
        if not isinstance(given, str):
            break
        try:
            given = strict_json.read(given or "{}")
        except ValueError:
            return {NO_JSON: call["function"]["arguments"]}
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {NO_JSON: call["function"]["arguments"]}


def _flat(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | Mapping) else value


def arguments_text(call: Mapping[str, Any]) -> str:
    """Returns a call's arguments as JSON text; "" becomes {}."""
    given = call["function"]["arguments"]
    if isinstance(given, str):
        return given or "{}"
    return json.dumps(given, ensure_ascii=False)


def _result(turn: Message, names: Mapping[str, str], shape: MessageShape) -> Message:
    """Converts a tool's result: as a user's turn with a title, or as a tool's turn with the name of its function if
    the template reads it. `names` maps call ids to names."""
    name = turn.get("name") or names.get(turn.get("tool_call_id") or "")
    if shape.results == "user":
        title = f"Result of {name}: " if name else "Result: "
        text, pictures = title + text_of(turn.get("content")), media_of(turn.get("content"))
        return {"role": "user", "content": [{"type": "text", "text": text}, *pictures] if pictures else text}
    turn = _without_null(turn)
    return {**turn, "name": name} if name and shape.result_names == "function" else turn


def _with_new_ids(turns: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Gives calls and their results ids in the template's form; ids that have this form are kept."""
    written: list[Message] = []
    new: dict[str, str] = {}  # by the client's id; of equal ids, the last call counts
    count = 0
    for turn in turns:
        if turn["role"] == "tool":
            call_id = turn["tool_call_id"]
            new_id = new.get(call_id) or _nine_character_id(call_id)
            written.append({**turn, "tool_call_id": new_id})
            continue
        calls = turn.get("tool_calls") or ()
        for number, call in enumerate(calls, count):
            name = call["function"]["name"]
            new[call["id"]] = (
                _nine_character_id(call["id"])
                if shape.call_ids == "nine"
                else _function_call_id(call["id"], name, number)
            )
        count += len(calls)
        renamed = [{**call, "id": new[call["id"]]} for call in calls]
        written.append({**turn, "tool_calls": renamed} if renamed else turn)
    return written


def _function_call_id(call_id: str, name: str, number: int) -> str:
    return call_id if name in call_id else f"functions.{name}:{number}"


def _nine_character_id(call_id: str) -> str:
    """Returns the id if it has nine letters or digits, as Mistral's templates demand, otherwise nine derived from
    its hash."""
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest(), "big")
    return "".join(ALPHABET[number // len(ALPHABET) ** place % len(ALPHABET)] for place in range(ID_LENGTH))
