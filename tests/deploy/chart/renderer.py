"""Renders the chart's templates: if, else, end; values, files and literals through toYaml, toJson, nindent, sha256sum.

Any other construct is an error, and so is a missing value. `engine.go` does the same with the template language that
Helm uses; a test compares the two where Go is installed, and with `helm template` where Helm is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Values = dict[str, Any]
FUNCTIONS = ("toYaml", "toJson")


class Unsupported(Exception):
    """A template construct that this renderer does not support."""


class Renderer:
    """Renderer for one set of values; `files`: contents for .Files.Get, by name."""

    def __init__(self, values: Values, files: Mapping[str, str], namespace: str) -> None:
        self._root = {"Values": values, "Release": {"Namespace": namespace}}
        self._files = files

    def render(self, template: str) -> str:
        parts = _parts(template)
        rendered = self._until(parts, ())[0]
        if next(parts, None) is not None:
            raise Unsupported("else or end without if")
        return rendered

    def _until(self, parts: Iterator[str], ends: tuple[str, ...], *, shown: bool = True) -> tuple[str, str]:
        """Returns the text up to one of `ends`, and which of them ended it."""
        text = []
        for part in parts:
            if not part.startswith("{{"):
                text.append(part)
                continue
            action = part.strip("{}- ")
            if action in ("else", "end"):
                if action not in ends:
                    raise Unsupported(f"{action} here")
                return "".join(text), action
            if action.startswith("if "):
                text.append(self._if(parts, action.removeprefix("if "), shown=shown))
            elif shown:
                text.append(self._piped(part[2:-2].strip(" -")))
        if ends:
            raise Unsupported("if without end")
        return "".join(text), ""

    def _if(self, parts: Iterator[str], condition: str, *, shown: bool) -> str:
        holds = shown and self._holds(condition)
        then, ended = self._until(parts, ("else", "end"), shown=holds)
        otherwise = "" if ended == "end" else self._until(parts, ("end",), shown=shown and not holds)[0]
        return then if holds else otherwise

    def _holds(self, condition: str) -> bool:
        first, *rest = condition.split()
        if first == "not":
            (path,) = rest
            return not self._value(path, may_lack=True)
        paths = rest if first == "or" else [first, *rest]
        if first != "or" and rest:
            raise Unsupported(condition)
        return any(bool(self._value(path, may_lack=True)) for path in paths)

    def _piped(self, action: str) -> str:
        first, *stages = [stage.split() if '"' not in stage else [stage] for stage in action.split(" | ")]
        value = self._first(first)
        for name, *arguments in stages:
            value = _apply(name, arguments, value)
        return str(value)

    def _first(self, words: list[str]) -> Any:
        if literal := re.fullmatch(r'"([^"]*)"', words[0]):
            return literal[1]
        if got := re.fullmatch(r'\.Files\.Get "([^"]+)"', words[0]):
            return self._files[got[1]]
        *functions, path = words
        value = self._value(path)
        for name in reversed(functions):
            value = _apply(name, [], value)
        return value

    def _value(self, path: str, *, may_lack: bool = False) -> Any:
        if not re.fullmatch(r"(\.\w+)+", path):
            raise Unsupported(path)
        found: Any = self._root
        for name in path[1:].split("."):
            if not isinstance(found, dict) or name not in found:
                if may_lack:
                    return None
                raise Unsupported(f"no value {path}")
            found = found[name]
        return found


def _parts(template: str) -> Iterator[str]:
    """Yields text and actions in turn; `{{-` and `-}}` trim adjacent white space."""
    template = re.sub(r"\s+\{\{- ", "{{", template)
    template = re.sub(r" -\}\}\s+", "}}", template)
    yield from (part for part in re.split(r"(\{\{.*?\}\})", template) if part)


def _apply(name: str, arguments: list[str], value: Any) -> Any:
    if name in FUNCTIONS:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    if name == "sha256sum":
        return hashlib.sha256(value.encode()).hexdigest()
    if name == "nindent":
        indent = " " * int(*arguments)
        return "\n" + "\n".join(indent + line for line in value.split("\n"))
    raise Unsupported(name)
