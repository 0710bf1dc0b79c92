"""Small conversations that show whether a template reads messages of some shape completely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOOLS: Sequence[Mapping[str, Any]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "A town."}},
                "required": ["place"],
            },
        },
    }
    for name in ("probe_lookup", "probe_second")
)


@dataclass(frozen=True, slots=True)
class ShapeProbe:
    """Conversation, and the words that must occur in the rendered text."""

    messages: Sequence[Mapping[str, Any]]
    words: tuple[str, ...]
    tools: Sequence[Mapping[str, Any]] = field(default=TOOLS)
    add_generation_prompt: bool = True


def _parts(*texts: str) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _turn(role: str, content: Any, **more: Any) -> Mapping[str, Any]:
    return {"role": role, "content": content, **more}


def _call(call_id: str, name: str, place: str) -> Mapping[str, Any]:
    """Returns a tool call whose arguments hold `place` and a nested value."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": {"place": place, "more": {"town": [1]}}},
    }


FIRST = "call_Probe0123456789abcdef"
SECOND = "call_Probe9876543210fedcba"
USER = _turn("user", "userword")
LAST = _turn("user", "lastword")
ANSWER = _turn("assistant", "answerword")
RESULT = _turn("tool", "resultword", tool_call_id=FIRST)
SECOND_RESULT = _turn("tool", "secondresult", tool_call_id=SECOND)
CALL = _call(FIRST, "probe_lookup", "placeword")
SECOND_CALL = _call(SECOND, "probe_second", "secondplace")
CALL_WORDS = ("userword", "probe_lookup", "placeword", "resultword")


def _calling(content: Any, *calls: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    return _turn("assistant", content, tool_calls=list(calls or (CALL,)), **more)


PLAIN = ShapeProbe([USER], ("userword",), ())
PLAIN_WITH_TOOLS = ShapeProbe([USER], ("userword",))


def contents(role: str) -> tuple[ShapeProbe, ...]:
    """Returns two probes in which `role` sends its content as a list of parts, and as a text."""
    before = [] if role in ("user", "system") else [USER]
    after = {"system": [USER], "assistant": [LAST], "tool": []}.get(role, [])
    if role == "tool":
        before = [USER, _calling(None)]
    more = {"tool_call_id": FIRST} if role == "tool" else {}
    return tuple(
        ShapeProbe([*before, _turn(role, content, **more), *after], words)
        for content, words in (
            (_parts("firstpart", "secondpart"), ("firstpart", "secondpart")),
            ("onetext", ("onetext",)),
        )
    )


def pictures(role: str, placeholder: str, modality: str) -> tuple[ShapeProbe, ...]:
    """Returns a probe in which a user, or a tool, sends an item and a text; the template has to show both."""
    content = [{"type": modality}, *_parts("userword" if role == "user" else "resultword")]
    if role == "user":
        return (ShapeProbe([_turn("user", content)], (placeholder, "userword"), ()),)
    turns = [USER, _calling(None), _turn("tool", content, tool_call_id=FIRST)]
    return (ShapeProbe(turns, (*CALL_WORDS, placeholder)),)


SYSTEM = (
    ShapeProbe([_turn("system", "systemone"), USER], ("systemone", "userword")),
    ShapeProbe(
        [_turn("system", "systemone"), _turn("system", "systemtwo"), USER], ("systemone", "systemtwo", "userword")
    ),
    ShapeProbe(
        [_turn("system", "systemone"), USER, ANSWER, _turn("system", "systemtwo"), LAST],
        ("systemone", "systemtwo", "userword", "answerword", "lastword"),
    ),
    ShapeProbe([USER, ANSWER, _turn("system", "systemtwo"), LAST], ("systemtwo", "userword", "answerword", "lastword")),
)
DEVELOPER = (
    ShapeProbe([_turn("developer", "developerone"), USER], ("developerone", "userword")),
    ShapeProbe(
        [_turn("system", "systemone"), _turn("developer", "developerone"), USER],
        ("systemone", "developerone", "userword"),
    ),
    ShapeProbe(
        [_turn("developer", "developerone"), USER, ANSWER, _turn("developer", "developertwo"), LAST],
        ("developerone", "developertwo", "userword", "answerword", "lastword"),
    ),
)
USER_TURNS = (ShapeProbe([USER, _turn("user", "secondword"), ANSWER, LAST], ("userword", "secondword", "lastword")),)
ASSISTANT_TURNS = (ShapeProbe([USER, ANSWER, _turn("assistant", "secondword"), LAST], ("answerword", "secondword")),)
CALLS = (
    ShapeProbe([USER, _calling(None), RESULT], CALL_WORDS),
    ShapeProbe([USER, _calling(""), RESULT], CALL_WORDS),
    ShapeProbe([USER, _calling(None), RESULT, ANSWER, LAST], (*CALL_WORDS, "answerword", "lastword")),
)
CALL_TEXT = (
    ShapeProbe([USER, _calling("textword"), RESULT], (*CALL_WORDS, "textword")),
    ShapeProbe(
        [USER, _calling("textword"), RESULT, ANSWER, LAST], ("lastword",)
    ),  # must not be refused, but may omit texts
)
PARALLEL = (
    ShapeProbe(
        [USER, _calling(None, CALL, SECOND_CALL), RESULT, SECOND_RESULT],
        (*CALL_WORDS, "probe_second", "secondplace", "secondresult"),
    ),
)
AFTER_RESULTS = (ShapeProbe([USER, _calling(None), RESULT, LAST], (*CALL_WORDS, "lastword")),)
REASONING = (
    ShapeProbe([USER, _calling(None, reasoning="thoughtword"), RESULT], (*CALL_WORDS, "thoughtword")),
    ShapeProbe(
        [USER, _turn("assistant", "answerword", reasoning="thoughtword")], ("answerword", "thoughtword"), (), False
    ),
    ShapeProbe(
        [USER, _turn("assistant", "answerword", reasoning="thoughtword"), LAST], ("answerword", "thoughtword"), ()
    ),
)
CALL_REASONING = (
    ShapeProbe([USER, _calling("textword", reasoning="thoughtword"), RESULT], (*CALL_WORDS, "textword", "thoughtword")),
)
