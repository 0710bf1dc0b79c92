"""Selection of the message shape: probes are rendered in one shape after the other until all words are shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from quire.services.frontend.tokenizer.message_shapes import probes
from quire.services.frontend.tokenizer.message_shapes.calls import TAG
from quire.services.frontend.tokenizer.message_shapes.probes import ShapeProbe
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.services.frontend.tokenizer.message_shapes.shaping import shape_messages
from quire.shared.errors import InvalidArgument

Render = Callable[[ShapeProbe, Sequence[Mapping[str, Any]], MessageShape], str]  # raises InvalidArgument
REFUSED = -1
NO_PLACEHOLDERS: Mapping[str, str] = {}
NONE_WORD = re.compile(r"\bNone\b")
PYTHON_TEXT = re.compile(r"\{'\w+': |[\"']type[\"']: ?[\"'](?:text|thinking)[\"']")  # Python's repr of a dict or a part
AROUND = frozenset({"userword"})  # also part of the conversation that determines the text around every other


@dataclass(frozen=True, slots=True)
class Axis:
    """Choices that are made together, since they depend on each other; the first of equals is taken."""

    choices: Mapping[str, tuple[str, ...]]
    probes: tuple[ShapeProbe, ...]

    def candidates(self, shape: MessageShape) -> Iterator[MessageShape]:
        """Yields all combinations of the axis's choices applied to `shape`, those with the fewest changes first."""
        numbers = product(*(range(len(values)) for values in self.choices.values()))
        for chosen in sorted(numbers, key=lambda numbers: (sum(1 for number in numbers if number), sum(numbers))):
            values: dict[str, Any] = {
                name: self.choices[name][number] for name, number in zip(self.choices, chosen, strict=True)
            }
            yield replace(shape, **values)


def _content_axis(role: str) -> Axis:
    return Axis({role: ("given", "text", "parts")}, probes.contents(role))


AXES = (
    Axis({"tools": ("null", "list")}, (probes.PLAIN,)),
    *(_content_axis(role) for role in ("user", "assistant")),
    Axis({"user_turns": ("kept", "merged")}, probes.USER_TURNS),
    Axis({"assistant_turns": ("kept", "merged")}, probes.ASSISTANT_TURNS),
    _content_axis("system"),
    Axis({"system_turns": ("kept", "early", "merged", "user")}, probes.SYSTEM),
    Axis(
        {
            "call_content": ("given", "absent", "empty", "null"),
            "arguments": ("object", "flat", "text"),
            "call_ids": ("given", "nine", "function"),
            "result_names": ("given", "function"),
        },
        probes.CALLS,
    ),
    Axis({"results": ("tool", "user"), "calls": ("native", "tagged", "text")}, probes.CALLS),
    _content_axis("tool"),
    Axis({"call_text": ("together", "split", "gathered")}, probes.CALL_TEXT),
    Axis({"parallel_calls": ("together", "split")}, probes.PARALLEL),
    Axis({"after_results": ("kept", "answered")}, probes.AFTER_RESULTS),
    Axis({"reasoning": ("fields", "parts")}, probes.REASONING),
    Axis({"call_reasoning": ("together", "split", "joined")}, probes.CALL_REASONING),
)
DEVELOPER = Axis({"developer": ("kept", "alone", "system")}, probes.DEVELOPER)


def select_shape(render: Render, source: str, placeholders: Mapping[str, str] = NO_PLACEHOLDERS) -> MessageShape:
    """Returns the shape in which the most words of the probes are shown, and of equals the one nearest to
    transformers'.

    `render` raises InvalidArgument where the template refuses; `source` is the template's text; `placeholders` are the
    tokens that stand for media, by modality, of which the first is probed.
    """
    scorer = _ShapeScorer(render)
    shape = MessageShape(developer="system")
    for axis in _axes(source, placeholders):
        shape = scorer.best(axis, shape)
    return shape


def _axes(source: str, placeholders: Mapping[str, str]) -> Iterator[Axis]:
    """Yields the axes that apply to a template, depending on the roles and tags that its text names."""
    for axis in AXES:
        if "calls" in axis.choices and TAG not in source:
            yield replace(axis, choices={**axis.choices, "calls": ("native", "text")})
        else:
            yield axis
    if "developer" in source:
        yield DEVELOPER
    for modality, placeholder in [*placeholders.items()][:1]:
        yield Axis({"pictures": ("parts", "text")}, probes.pictures("user", placeholder, modality))
        yield Axis({"result_pictures": ("kept", "user")}, probes.pictures("tool", placeholder, modality))


class _ShapeScorer:
    """Scores of shapes of one template, by the words of the probes that it shows."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._around: dict[bool, str] = {}  # text around every conversation, by whether tools are offered
        for probe in (probes.PLAIN, probes.PLAIN_WITH_TOOLS):
            with contextlib.suppress(InvalidArgument):
                self._around[bool(probe.tools)] = render(probe, probe.messages, MessageShape(tools="list"))

    def best(self, axis: Axis, shape: MessageShape) -> MessageShape:
        """Returns the first candidate of the axis with the highest score and stops at the first that shows every
        word."""
        most = sum(len(probe.words) for probe in axis.probes)
        best, best_score = shape, None
        for candidate in axis.candidates(shape):
            score = sum(self._score(probe, candidate) for probe in axis.probes)
            if best_score is None or score > best_score:
                best, best_score = candidate, score
            if score == most:
                break
        return best

    def _score(self, probe: ShapeProbe, shape: MessageShape) -> int:
        """Counts the probe's words that the template shows beyond its surroundings, less one for new faults; REFUSED
        if it raises."""
        probe = self._usable(probe)
        try:
            text = self._render(probe, shape_messages(probe.messages, shape), shape)
        except InvalidArgument:
            return REFUSED
        surroundings = self._around.get(bool(probe.tools), "")
        shown = sum(
            text.count(word) > surroundings.count(word) or (word in AROUND and word in text) for word in probe.words
        )
        has_new_faults = _faults(text) > _faults(surroundings)
        return shown - has_new_faults

    def _usable(self, probe: ShapeProbe) -> ShapeProbe:
        """Offers tools, or none, where the template always refuses the other."""
        if bool(probe.tools) in self._around or not self._around:
            return probe
        return replace(probe, tools=() if probe.tools else probes.TOOLS)


def _faults(text: str) -> int:
    return len(NONE_WORD.findall(text)) + len(PYTHON_TEXT.findall(text))
