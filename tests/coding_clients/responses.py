"""Reading of /v1/responses answers as Codex does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.coding_clients.events import Answered, Call

ENDS = ("response.completed", "response.incomplete")
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


def read_stream(events: list[dict[str, Any]]) -> Answered:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in ENDS
    items: list[dict[str, Any]] = []
    number = 2
    while number < len(events) - 1:
        number, item = _item(events, number, len(items))
        items.append(item)
    assert items == events[-1]["response"]["output"]
    return read_whole(events[-1]["response"])


def _item(events: list[dict[str, Any]], number: int, index: int) -> tuple[int, dict[str, Any]]:
    """Returns the position after the item that begins at `number`, and the item; asserts that its deltas add up to its
    text."""
    added = events[number]
    assert added["type"] == "response.output_item.added"
    texts: list[str] = []
    while (event := events[number])["type"] != "response.output_item.done":
        assert event["output_index"] == index
        if event["type"].endswith(".delta"):
            assert event["item_id"] == added["item"]["id"]
            texts.append(event["delta"])
        number += 1
    item: dict[str, Any] = event["item"]
    assert item["id"] == added["item"]["id"]
    assert "".join(texts) == _text(item)
    return number + 1, item


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    assert {part["type"] for part in item["content"]} <= {TEXTS[item["type"]]}
    return "".join(part["text"] for part in item["content"])


def read_whole(response: dict[str, Any]) -> Answered:
    assert response["object"] == "response"
    assert response["status"] in ("completed", "incomplete")
    items = response["output"]
    answered = Answered(
        text="".join(_text(item) for item in items if item["type"] == "message"),
        reasoning="".join(_text(item) for item in items if item["type"] == "reasoning"),
        calls=[_call(item) for item in items if item["type"] == "function_call"],
        is_cut=response["status"] == "incomplete",
        num_prompt_tokens=response["usage"]["input_tokens"],
        num_cached_tokens=response["usage"]["input_tokens_details"]["cached_tokens"],
    )
    answered.check()
    answered.spliced = [_sent_back(item) for item in items]
    return answered


def _call(item: dict[str, Any]) -> Call:
    return Call(item["call_id"], item["name"], item["arguments"])


def _sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """Returns the item without id and status, as Codex sends it when nothing is stored."""
    kept = {name: value for name, value in item.items() if name not in ("id", "status")}
    return {**kept, "encrypted_content": None} if item["type"] == "reasoning" else kept


def results(answered: Answered, texts: Iterator[Any]) -> list[dict[str, Any]]:
    return [{"type": "function_call_output", "call_id": call.id, **next(texts)} for call in answered.calls]
