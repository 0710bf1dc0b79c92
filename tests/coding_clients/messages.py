"""Reading of /v1/messages answers as Anthropic's clients do it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.coding_clients.events import Answered, Call

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


def read_stream(events: list[dict[str, Any]]) -> Answered:
    events = [event for event in events if event["type"] != "ping"]
    first, last, end = events[0], events[-2], events[-1]
    assert [first["type"], last["type"], end["type"]] == ["message_start", "message_delta", "message_stop"]
    assert first["message"]["content"] == []
    assert first["message"]["role"] == "assistant"
    blocks = [_block(events, number) for number in range(1, len(events) - 2) if _starts(events[number])]
    assert [block.pop("index") for block in blocks] == list(range(len(blocks)))
    return _answered(blocks, last["delta"]["stop_reason"], {**first["message"]["usage"], **last["usage"]})


def read_whole(answer: dict[str, Any]) -> Answered:
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    return _answered(answer["content"], answer["stop_reason"], answer["usage"])


def _starts(event: dict[str, Any]) -> bool:
    assert event["type"] in ("content_block_start", "content_block_delta", "content_block_stop"), event
    return event["type"] == "content_block_start"


def _block(events: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Returns the block that starts at `number`, with all its deltas."""
    index, block = events[number]["index"], {**events[number]["content_block"], "index": events[number]["index"]}
    partial = ""
    while (event := events[number := number + 1])["type"] == "content_block_delta":
        assert event["index"] == index
        field = DELTAS[block["type"]][event["delta"]["type"]]
        if field == "partial_json":
            partial += event["delta"][field]
        else:
            block[field] += event["delta"][field]
    assert event == {"type": "content_block_stop", "index": index}
    if block["type"] == "tool_use":
        block["input"] = partial
    return block


def _answered(blocks: list[dict[str, Any]], reason: str, usage: dict[str, Any]) -> Answered:
    assert reason in REASONS
    for block in blocks:
        if block["type"] == "thinking":
            assert block["signature"]
    answered = Answered(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=[_call(block) for block in blocks if block["type"] == "tool_use"],
        is_cut=reason == "max_tokens",
        num_prompt_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
        num_cached_tokens=usage["cache_read_input_tokens"],
    )
    answered.check()
    assert answered.is_cut or (reason == "tool_use") == bool(answered.calls)
    answered.spliced = [{"role": "assistant", "content": [_sent_back(block) for block in blocks]}] if blocks else []
    return answered


def _call(block: dict[str, Any]) -> Call:
    arguments = block["input"]
    return Call(block["id"], block["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def _sent_back(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block
    arguments = block["input"]
    try:
        return {**block, "input": json.loads(arguments or "{}") if isinstance(arguments, str) else arguments}
    except ValueError:
        return {**block, "input": {}}  # as Claude Code does with arguments that were cut


def results(answered: Answered, texts: Iterator[Any]) -> list[dict[str, Any]]:
    blocks = [{"type": "tool_result", "tool_use_id": call.id, **next(texts)} for call in answered.calls]
    return [{"role": "user", "content": blocks}] if blocks else []
