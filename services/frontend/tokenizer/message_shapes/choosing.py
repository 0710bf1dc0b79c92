"""The choice of the shape: probes are rendered in one shape after the other until everything shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from services.frontend.tokenizer.message_shapes import probes
from services.frontend.tokenizer.message_shapes.probes import Probe
from services.frontend.tokenizer.message_shapes.shape import MessageShape
from services.frontend.tokenizer.message_shapes.shaping import shaped
from shared.errors import InvalidArgument

Render = Callable[[Probe, Sequence[Mapping[str, Any]]], str]  # raises InvalidArgument
REFUSED = -1
NONE_WORD = re.compile(r"\bNone\b")
PYTHON_TEXT = re.compile(r"\{'\w+': '|[\"']type[\"']: ?[\"'](?:text|thinking)[\"']")  # of a dict or a part, as it is
WORD_IN_TEXT = "probe_lookup"  # only tools have it


@dataclass(frozen=True, slots=True)
class Axis:
    """Choices that are made together, since one works only with the other; the first of equals is taken."""

    choices: Mapping[str, tuple[str, ...]]
    probes: tuple[Probe, ...]

    def candidates(self, shape: MessageShape) -> Iterator[MessageShape]:
        """Yields those that change least first."""
        numbers = product(*(range(len(values)) for values in self.choices.values()))
        for chosen in sorted(numbers, key=lambda numbers: (sum(1 for number in numbers if number), sum(numbers))):
            values = {name: self.choices[name][number] for name, number in zip(self.choices, chosen, strict=True)}
            yield replace(shape, **values)


def _content_axis(role: str) -> Axis:
    return Axis({role: ("given", "text", "parts")}, probes.contents(role))


AXES = (
    *(_content_axis(role) for role in ("user", "assistant")),
    Axis({"user_turns": ("kept", "merged")}, probes.USER_TURNS),
    Axis({"assistant_turns": ("kept", "merged")}, probes.ASSISTANT_TURNS),
    _content_axis("system"),
    Axis({"system_turns": ("kept", "early", "merged", "user")}, probes.SYSTEM),
    Axis(
        {
            "call_content": ("given", "absent", "empty", "null"),
            "arguments": ("object", "text"),
            "call_ids": ("given", "nine"),
            "result_names": ("given", "function"),
        },
        probes.CALLS,
    ),
    Axis({"results": ("tool", "user"), "calls": ("native", "text")}, probes.CALLS),
    _content_axis("tool"),
    Axis({"call_text": ("together", "split")}, probes.CALL_TEXT),
    Axis({"parallel_calls": ("together", "split")}, probes.PARALLEL),
    Axis({"reasoning": ("fields", "parts")}, probes.REASONING),
    Axis({"call_reasoning": ("together", "split", "joined")}, probes.CALL_REASONING),
)
DEVELOPER_VALUES = ("kept", "alone", "system")


def choose(render: Render, source: str) -> MessageShape:
    """Returns the shape in which most of each probe shows, and of equals that which is nearest to transformers'.
    `render` raises InvalidArgument where the template refuses; `source` is the template's text."""
    scale = _Scale(render)
    shape = MessageShape(developer="system")
    for axis in AXES:
        shape = scale.best(axis, shape)
    if "developer" in source:
        shape = scale.best(Axis({"developer": DEVELOPER_VALUES}, probes.DEVELOPER), shape)
    return shape


class _Scale:
    """Weighs shapes of one template by what it shows of probes."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._nones = {bool(probe.tools): self._count(probe) for probe in (probes.PLAIN, probes.PLAIN_WITH_TOOLS)}

    def best(self, axis: Axis, shape: MessageShape) -> MessageShape:
        most = sum(len(probe.words) for probe in axis.probes)
        best, best_score = shape, None
        for candidate in axis.candidates(shape):
            score = sum(self._score(probe, candidate) for probe in axis.probes)
            if best_score is None or score > best_score:
                best, best_score = candidate, score
            if score == most:
                break
        return best

    def _count(self, probe: Probe) -> tuple[int, int]:
        """Counts, in what stands around every conversation, the word None and the name of the probes' tool."""
        try:
            text = self._render(probe, probe.messages)
        except InvalidArgument:
            return 0, 0
        return len(NONE_WORD.findall(text)), text.count(WORD_IN_TEXT)

    def _score(self, probe: Probe, shape: MessageShape) -> int:
        try:
            text = self._render(probe, shaped(probe.messages, shape))
        except InvalidArgument:
            return REFUSED
        nones, named = self._nones[bool(probe.tools)]
        shown = sum(word in text for word in probe.words)
        if WORD_IN_TEXT in probe.words and text.count(WORD_IN_TEXT) <= named:
            shown -= 1
        spoiled = len(NONE_WORD.findall(text)) > nones or PYTHON_TEXT.search(text) is not None
        return shown - spoiled
