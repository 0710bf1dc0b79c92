"""Structural tags: free text with embedded formats, or formats combined.

Two notations are in use: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"format": {"type":
...}} with nested formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import ebnf, regex
from quire.shared.structured_output.checks import check_schema, refuse
from quire.shared.structured_output.json_rule import json_rule
from quire.shared.structured_output.literals import SpecialTokens, literal, pieces, quoted, token

ANY = "TEXT"
ANY_DEFINITION = r"TEXT: /(.|\n)*/"
MAX_REPEAT = 10_000
Json = dict[str, Any]


def lark(tags: Json, options: pb.StructuredOutput, specials: SpecialTokens) -> str:
    """Returns the grammar of a structural tag. Raises InvalidArgument."""
    writer = _Writer(options, specials)
    body = writer.format(as_format(tags), "format")
    return "\n".join([f"start: {body}", ANY_DEFINITION, *writer.lines]) + "\n"


def as_format(tags: Json) -> Json:
    """Returns a tag in the notation with `format`: structures and triggers become triggered_tags. Raises
    InvalidArgument if the tag has neither."""
    if "format" in tags:
        return _object(tags["format"], "format")
    structures, triggers = tags.get("structures"), tags.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise wrong("format", "must be given, or structures and triggers")
    found = [_object(structure, f"structures[{i}]") for i, structure in enumerate(structures)]
    content = [{"type": "json_schema", "json_schema": structure.get("schema", {})} for structure in found]
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [{**structure, "content": inner} for structure, inner in zip(found, content, strict=True)],
    }


def wrong(where: str, text: str) -> Exception:
    return refuse(f"structural_tag: {where} {text}")


class _Writer:
    """Writes formats as expressions of a rule, and the additional rules that they need."""

    def __init__(self, options: pb.StructuredOutput, specials: SpecialTokens) -> None:
        self._options = options
        self._specials = specials
        self.lines: list[str] = []
        self._formats: dict[str, Callable[[Json, str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda node, where: f"({self._content(node, where)})?",
            "star": lambda node, where: f"({self._content(node, where)})*",
            "plus": lambda node, where: f"({self._content(node, where)})+",
            "repeat": self._repeat,
        }

    def format(self, node: Any, where: str) -> str:
        """Writes a format by its type and returns the expression, adding rules that it needs to `lines`. `where`:
        path for errors. Raises InvalidArgument for an unknown type."""
        kind = _object(node, where).get("type")
        write = self._formats.get(str(kind))
        if write is None:
            raise wrong(f"{where}.type", f"{kind!r} is not supported; available: {', '.join(self._formats)}")
        return write(node, where)

    def _content(self, node: Json, where: str) -> str:
        return self.format(node.get("content"), f"{where}.content")

    def _const_string(self, node: Json, where: str) -> str:
        return literal(_text(node, "value", where), self._specials)

    def _json_schema(self, node: Json, where: str) -> str:
        """Writes the rule of a JSON Schema. Raises InvalidArgument for another style than JSON, or an invalid
        schema."""
        if node.get("style", "json") != "json":
            raise wrong(f"{where}.style", f"{node['style']!r} is not supported; available: 'json'")
        _only(node, {"json_schema", "style"}, where)
        schema = node.get("json_schema", {})
        check_schema(schema)
        return json_rule(schema, self._options)

    def _regex(self, node: Json, where: str) -> str:
        return self._terminal(regex.terminal(_text(node, "pattern", where)))

    def _grammar(self, node: Json, where: str) -> str:
        text = _text(node, "grammar", where)
        inner = ebnf.lark(text) if ebnf.is_ebnf(text) else text
        return f"%lark {{\n{inner}\n}}"

    def _any_text(self, node: Json, where: str) -> str:
        _only(node, {"excludes"}, where)
        return self._text_without(_texts(node, "excludes", where))

    def _sequence(self, node: Json, where: str) -> str:
        """Writes a sequence; any text before a fixed text ends at the first occurrence of that text."""
        elements = _list(node, "elements", where)
        written = []
        at = 0
        while at < len(elements):
            here, following = elements[at], elements[at + 1] if at + 1 < len(elements) else None
            if _is(here, "any_text") and _is(following, "const_string"):
                end = _text(elements[at + 1], "value", f"{where}.elements[{at + 1}]")
                written.append(self._text_until([end], here, f"{where}.elements[{at}]"))
                at += 2
            else:
                written.append(self.format(here, f"{where}.elements[{at}]"))
                at += 1
        return f"({' '.join(written)})"

    def _or(self, node: Json, where: str) -> str:
        elements = _list(node, "elements", where)
        return f"({' | '.join(self.format(e, f'{where}.elements[{i}]') for i, e in enumerate(elements))})"

    def _repeat(self, node: Json, where: str) -> str:
        """Writes min to max repetitions of the content; max -1: unbounded. Raises InvalidArgument for bounds out of
        range."""
        least, most = node.get("min", 0), node.get("max", -1)
        if not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= MAX_REPEAT and most <= MAX_REPEAT):
            raise wrong(where, f"min and max must be integers of at most {MAX_REPEAT}, got {least!r} and {most!r}")
        if -1 != most < least:
            raise wrong(where, f"min must be at most max={most}, got {least}")
        return f"({self._content(node, where)}){{{least},{'' if most < 0 else most}}}"

    def _tag(self, node: Json, where: str) -> str:
        return f"({literal(_text(node, 'begin', where), self._specials)} {self._inside(node, where)})"

    def _inside(self, tag: Json, where: str) -> str:
        """Writes the content and end of a tag, whose begin is written already; any text ends at the first occurrence
        of an end. Raises InvalidArgument for an end that is no text."""
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise wrong(f"{where}.end", f"must be a text or a list of texts, got {tag.get('end')!r}")
        if _is(tag.get("content"), "any_text") and all(ends):
            return self._text_until(ends, tag["content"], f"{where}.content")
        written = " | ".join(literal(end, self._specials) for end in ends)
        return f"{self._content(tag, where)} ({written})"

    def _triggered_tags(self, node: Json, where: str) -> str:
        """Writes free text in which each trigger is followed by one of its tags."""
        _only(node, {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}, where)
        triggers, excludes = _texts(node, "triggers", where), _texts(node, "excludes", where)
        if not triggers or not all(triggers):
            raise wrong(f"{where}.triggers", "must hold at least one text, none of them empty")
        by_trigger: dict[str, list[str]] = {}
        for i, tag in enumerate(_list(node, "tags", where)):
            place = f"{where}.tags[{i}]"
            begin = _text(_object(tag, place), "begin", place)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise wrong(f"{place}.begin", f"{begin!r} starts with none of the triggers")
            rest = begin[len(trigger) :]
            inside = f"{literal(rest, self._specials) if rest else ''} {self._inside(tag, place)}"
            by_trigger.setdefault(trigger, []).append(inside.strip())
        tags = [f"{self._head(trigger, excludes)} ({' | '.join(bodies)})" for trigger, bodies in by_trigger.items()]
        tag = self._rule(" | ".join(tags))
        if node.get("stop_after_first"):
            return tag if node.get("at_least_one") else f"({tag} | {self._text_without([*triggers, *excludes])})"
        return f"({tag}{'+' if node.get('at_least_one') else '*'} {self._text_without([*triggers, *excludes])})"

    def _tags_with_separator(self, node: Json, where: str) -> str:
        """Writes tags that follow each other with the separator in between: any number, at least one (at_least_one),
        or no further one after the first (stop_after_first)."""
        _only(node, {"tags", "separator", "at_least_one", "stop_after_first"}, where)
        tags = _list(node, "tags", where)
        tag = self._rule(" | ".join(self._tag(_object(t, where), f"{where}.tags[{i}]") for i, t in enumerate(tags)))
        separator = node.get("separator", "")
        more = f"({literal(separator, self._specials) if separator else ''} {tag})*"
        some = tag if node.get("stop_after_first") else f"({tag} {more})"
        return some if node.get("at_least_one") else f"({some})?"

    def _head(self, trigger: str, excludes: list[str]) -> str:
        """Writes text up to and including the first `trigger`, which contains none of `excludes`; special tokens in
        the trigger stand for themselves."""
        first, *rest = pieces(trigger, self._specials)
        marks = self._marks([trigger, *excludes])
        text = self._terminal(without(excludes)) if excludes else ANY
        if first[1] is not None:
            return f"{marks} {text} {literal(trigger, self._specials)}"
        if rest:
            after = " ".join(literal(part, self._specials) for part, _ in rest)
            return f"{marks} {self._terminal(f'{text} {quoted(first[0])}')} {after}"
        return f"{marks} {self._rule(f'{text} {quoted(trigger)}', lazy=True)}"

    def _text_until(self, ends: list[str], any_text: Json, where: str) -> str:
        """Writes text up to and including the first of `ends`."""
        excludes = _texts(any_text, "excludes", where)
        heads = [self._head(end, excludes) for end in ends]
        return f"({' | '.join(heads)})"

    def _text_without(self, excludes: list[str]) -> str:
        text = self._terminal(without(excludes)) if excludes else ANY
        return f"{self._marks(excludes)} {text}".strip()

    def _marks(self, excludes: list[str]) -> str:
        """Writes any number of texts that each end with a special token allowed in free text; empty if there are no
        such tokens. `excludes`: texts that must not occur."""
        names = {token_id: name for name, token_id in self._specials.ids.items()}
        allowed = [i for i in sorted(self._specials.in_text) if not any(text in names[i] for text in excludes)]
        if not allowed:
            return ""
        text = self._terminal(without(excludes)) if excludes else ANY
        return f"({text} ({' | '.join(token(i) for i in allowed)}))*"

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"s{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"S{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def without(excludes: list[str]) -> str:
    """Returns a terminal for text that contains none of these."""
    return f"{ANY} & ~({ANY} ({' | '.join(quoted(text) for text in excludes)}) {ANY})"


def _is(node: Any, kind: str) -> bool:
    return isinstance(node, dict) and node.get("type") == kind


def _object(node: Any, where: str) -> Json:
    if not isinstance(node, dict):
        raise wrong(where, f"must be an object, got {node!r}")
    return node


def _list(node: Json, key: str, where: str) -> list[Any]:
    """Returns a list field that is not empty. Raises InvalidArgument."""
    found = node.get(key)
    if not isinstance(found, list) or not found:
        raise wrong(f"{where}.{key}", f"must be a list that is not empty, got {found!r}")
    return found


def _text(node: Json, key: str, where: str) -> str:
    """Returns a text field that is not empty. Raises InvalidArgument."""
    found = node.get(key)
    if not isinstance(found, str) or not found:
        raise wrong(f"{where}.{key}", f"must be a text that is not empty, got {found!r}")
    return found


def _texts(node: Json, key: str, where: str) -> list[str]:
    """Returns an optional list of texts that are not empty. Raises InvalidArgument."""
    found = node.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise wrong(f"{where}.{key}", f"must be a list of texts, none of them empty, got {found!r}")
    return found


def _only(node: Json, known: set[str], where: str) -> None:
    """Raises InvalidArgument for a set option that is not in `known`, because ignoring a restriction would silently
    change the result."""
    for key, value in node.items():
        if key not in {"type", *known} and value not in (None, False, [], ""):
            raise wrong(f"{where}.{key}", "is not supported")
