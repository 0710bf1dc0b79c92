"""Choosing a tool and its arguments, and wording what the tool returned.

A call is written the way Hermes models write it: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.evals.catalogue import TOOL_KINDS, Param, ToolKind
from tools.evals.item import Item, Message, Skill, Split, Tool, Verdict, draw, exact, user

SIZES = ("2", "3", "4", "reply")
"""How many tools are offered; `reply` also has the tool's result and asks for the answer to the user."""

_SLOT = re.compile(r"\{(\w+)\}")
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as one prompt offers it, under one of its names, with a name for each parameter's slot."""

    kind: ToolKind
    name: str
    names: dict[str, str]

    @property
    def schema(self) -> Tool:
        """Returns the tool in OpenAI's form; parameters that every request gives are required."""
        properties = {self.names[p.slot]: {"type": p.kind, "description": p.about} for p in self.kind.params}
        always = [self.names[p.slot] for p in self.kind.params if _always_given(self.kind, p)]
        parameters = {"type": "object", "properties": properties, "required": always}
        function = {"name": self.name, "description": self.kind.about, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A user's request: the matching tool, the words, and the values of the slots that the words mention."""

    offer: OfferedTool
    text: str
    slots: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        """The right call; arguments stand in the order of the tool's parameters."""
        given = [p.slot for p in self.offer.kind.params if p.slot in self.slots]
        return {"name": self.offer.name, "arguments": {self.offer.names[slot]: self.slots[slot] for slot in given}}


def _always_given(kind: ToolKind, param: Param) -> bool:
    return all(param.slot in _SLOT.findall(request) for request in kind.requests)


def _offer(rng: Random, kind: ToolKind) -> OfferedTool:
    return OfferedTool(kind, rng.choice(kind.names), {p.slot: rng.choice(p.names) for p in kind.params})


def _request(rng: Random, offer: OfferedTool) -> ToolRequest:
    template = rng.choice(offer.kind.requests)
    slots = {p.slot: p.value(rng) for p in offer.kind.params if f"{{{p.slot}}}" in template}
    return ToolRequest(offer, template.format(**slots), slots)


def spell_call(call: dict[str, Any]) -> str:
    """The call as the model writes it."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _reply_item(rng: Random, request: ToolRequest, tools: tuple[Tool, ...], key: str) -> Item:
    """Returns the item in which the tool has answered with random values and the model words its reply."""
    kind = request.offer.kind
    result = {name: value(rng) for name, value in kind.result.items()}
    called: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": request.call}],
    }
    returned: Message = {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)}
    # A reply may mention an argument that the request left open; then only the tool's name identifies the key.
    missing = [p for p in kind.params if p.slot not in request.slots and f"{{{p.slot}}}" in kind.reply]
    assert not missing, f"reply of {kind.names[0]} names {missing[0].slot}, which a request may leave out"
    expected = kind.reply.format(**request.slots, **result)
    return Item("tools", "reply", (user(request.text), called, returned), expected, key, tools)


def sample(rng: Random, split: Split, size: str) -> Item:
    """A request with tools to choose from; the tools offered and the request's words decide the split."""
    count = int(size) if size.isdigit() else rng.randint(2, 4)

    def candidate() -> tuple[str, tuple[list[OfferedTool], ToolRequest]]:
        """Draws tools and a request that one of them serves, with a key of both."""
        offers = [_offer(rng, kind) for kind in rng.sample(TOOL_KINDS, count)]
        request = _request(rng, rng.choice(offers))
        names = ",".join(sorted(offer.name for offer in offers))
        return f"tools|{names}|{request.text}", (offers, request)

    key, (offers, request) = draw(split, candidate)
    tools = tuple(offer.schema for offer in offers)
    if size == "reply":
        return _reply_item(rng, request, tools, key)
    return Item("tools", size, (user(request.text),), spell_call(request.call), key, tools, max_tokens=128)


def check(item: Item, text: str) -> Verdict:
    """Valid: one call of a tool that was offered. Right: the expected tool and arguments, in any JSON spelling."""
    if item.size == "reply":
        return exact(item, text)
    found = _CALL.fullmatch(text.strip())
    wanted = _CALL.fullmatch(item.expected)
    assert wanted is not None
    try:
        call = json.loads(found[1]) if found else None
    except ValueError:
        call = None
    offered = {tool["function"]["name"] for tool in item.tools}
    valid = isinstance(call, dict) and call.get("name") in offered
    return Verdict(valid=valid, right=call == json.loads(wanted[1]))


SKILL = Skill("tools", SIZES, sample, check)
