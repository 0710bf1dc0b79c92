"""Structural formats of required calls, as in shared/structured_output/structural_tag.py.

The parser of the same format reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.services.frontend.request.request import TextInput, Tool
from quire.services.frontend.request.tool_offer import INPUT

Json = dict[str, Any]

ANY_ARGUMENTS: Json = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of the calls in one format."""

    call: Callable[[Tool], Json]  # one call
    before: str = ""
    between: str = "\n"
    after: str = ""
    needs: str = ""  # a token that only some vocabularies of the family have
    trigger: str = ""  # text that begins calls; empty: the format's first token
    plain_texts: bool = False  # strings are written without quotation marks, so that a grammar can apply to them

    def enforces(self, tool: Tool) -> bool:
        """Returns whether a call of the tool that the model makes on its initiative is constrained."""
        text_input = tool.text_input
        return tool.strict and (text_input is None or text_input.syntax == "regex" or self.plain_texts)


def const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def sequence(*elements: Json | str) -> Json:
    """Joins formats; texts become constant strings, and empty ones are left out."""
    written = [const(element) if isinstance(element, str) else element for element in elements if element]
    return written[0] if len(written) == 1 else {"type": "sequence", "elements": written}


def one_of(elements: Iterable[Json]) -> Json:
    options = list(elements)
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def optional(content: Json) -> Json:
    return {"type": "optional", "content": content}


def schema(document: Any) -> Json:
    return {"type": "json_schema", "json_schema": document}


def arguments_schema(tool: Tool) -> Json:
    """Returns the schema of the arguments object; of an empty object where a tool has no parameters."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.text_input is not None and tool.text_input.syntax == "regex":
        pattern = {"type": "string", "pattern": f"^(?:{tool.text_input.definition})$"}
        return {**tool.parameters, "properties": {INPUT: pattern}}
    return {"type": "object", **tool.parameters}


def json_arguments(begin: str, end: str, *, quote: bool = True) -> Callable[[Tool], Json]:
    """Returns a builder for calls with JSON arguments.

    NAME in `begin` is replaced by the function's name, in quotation marks if `quote`.
    """

    def call(tool: Tool) -> Json:
        name = json.dumps(tool.name, ensure_ascii=False) if quote else tool.name
        return sequence(begin.replace("NAME", name), schema(arguments_schema(tool)), end)

    return call


@dataclass(frozen=True, slots=True)
class ParameterTexts:
    """Texts around a function and its parameters, with the placeholders NAME, KEY and TYPE."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    string_parameter: str = ""  # for formats that mark strings

    def opening(self, key: str, document: Any) -> str:
        """Returns the text that opens the parameter `key`, with the type that its schema declares (object if it
        declares none)."""
        declared = document.get("type") if isinstance(document, dict) else None
        text = (declared == "string" and self.string_parameter) or self.parameter
        kind = "number" if declared == "integer" else declared if isinstance(declared, str) else "object"
        return text.replace("TYPE", kind).replace("KEY", key)


def text_parameters(texts: ParameterTexts) -> Callable[[Tool], Json]:
    """Returns a builder for calls with one text per parameter, in the order of the schema."""

    def call(tool: Tool) -> Json:
        """Returns the format of one call: its parameters in the schema's order, optional ones optional."""
        needed = tool.parameters.get("required") or ()
        written = []
        for key, document in (tool.parameters.get("properties") or {}).items():
            value = (
                parameter_value(document, tool.parameters) if tool.text_input is None else _text_input(tool.text_input)
            )
            tag = {"type": "tag", "begin": texts.opening(key, document), "content": value, "end": texts.parameter_end}
            written.append(tag if key in needed else optional(tag))
        return sequence(texts.function.replace("NAME", tool.name), *written, texts.function_end)

    return call


def _text_input(text_input: TextInput) -> Json:
    """Returns the format of a custom tool's input: any text, a regular expression, or a grammar."""
    if not text_input.syntax:
        return {"type": "any_text"}
    if text_input.syntax == "regex":
        return {"type": "regex", "pattern": text_input.definition}
    return {"type": "grammar", "grammar": text_input.definition}


def parameter_value(document: Any, root: Mapping[str, Any]) -> Json:
    """Returns the format of a parameter's value: plain text up to the parameter's end, or one of the texts of an
    enum."""
    if not isinstance(document, dict) or document.get("type") != "string":
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return schema({**shared, **document} if isinstance(document, dict) else document)
    options = document.get("enum") or ([document["const"]] if "const" in document else [])
    if options and all(isinstance(option, str) and option for option in options):
        return one_of(const(option) for option in options)
    return {"type": "any_text"}


def free_text_with_calls(grammar: CallGrammar, tools: Sequence[Tool], marker: str, *, only_one: bool) -> Json | None:
    """Returns free text in which `marker` begins a call; None where calls do not begin with the marker."""
    relaxed = [tool if tool.strict else replace(tool, parameters=ANY_ARGUMENTS) for tool in tools]
    bodies = [calls(grammar, relaxed, only_one=only_one)] if grammar.before else map(grammar.call, relaxed)
    tags = [_as_tag(body) for body in bodies]
    if not all(tag["begin"].startswith(marker) for tag in tags):
        return None
    return {"type": "triggered_tags", "triggers": [marker], "tags": tags, "stop_after_first": only_one}


def _as_tag(body: Json) -> Json:
    """Converts a sequence that begins with a constant text to a tag."""
    begin, *rest = body["elements"]
    return {"type": "tag", "begin": begin["value"], "content": sequence(*rest), "end": ""}


def calls(grammar: CallGrammar, tools: Iterable[Tool], *, only_one: bool) -> Json:
    """Returns one or more calls; exactly one if `only_one`."""
    one = one_of(grammar.call(tool) for tool in tools)
    more = {"type": "star", "content": sequence(grammar.between, one)}
    return sequence(grammar.before, one, *(() if only_one else (more,)), grammar.after)
