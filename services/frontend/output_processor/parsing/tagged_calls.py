"""Calls written with tags: one around the function, one around each parameter's plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import LONGEST_NAME, close
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps, one_newline
from services.frontend.output_processor.parsing.tool_schemas import ANYTHING, ToolSchemas
from services.frontend.output_processor.parsing.typed_arguments import STRING, TypedArguments
from services.frontend.output_processor.parsing.wording import ParameterTexts, Wording, sequence, text_parameters
from services.frontend.output_processor.parsing.writer import EventWriter

NAME = re.compile(r"[^<>\"\n]+")

Types = frozenset[str] | None


def no_padding(_text: str, _start: int, end: int) -> int:
    """White space at the end of a value counts."""
    return end


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts of a format. Names stand between `function` and `named`, `parameter` and one of `keyed`."""

    block: str
    block_end: str
    function: str
    named: str
    function_end: str
    parameter: str
    keyed: Mapping[str, Types]  # with the types that the value then has; None: the tool's schema says
    parameter_end: str
    fillers: tuple[str, str] | tuple[()] = ()  # before and after a function, without meaning
    on_lines: bool = False  # values stand on lines of their own: a line break before and after is none of theirs
    bare_functions: bool = False  # the block's tag is sometimes missing
    ends: Markers = field(init=False)
    starts: Markers = field(init=False)

    def __post_init__(self) -> None:
        padding = one_newline if self.on_lines else no_padding
        object.__setattr__(self, "ends", Markers(self.parameter_end, padding=padding))
        object.__setattr__(self, "starts", Markers(*self.opening))

    @property
    def opening(self) -> tuple[str, ...]:
        return (self.block, self.function) if self.bare_functions else (self.block,)


def tagged(tags: Tags, *tokens: str) -> ToolFormat:
    def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
        yield from _Reading(tags, scan, writer, schemas).run()

    return ToolFormat(read, tokens, wordings=(_wording(tags),), starts=tags.opening)


def _wording(tags: Tags) -> Wording:
    line = "\n" if tags.on_lines else ""
    before, after = tags.fillers or ("", "")
    closes = {types: close for close, types in tags.keyed.items()}
    texts = ParameterTexts(
        function=f"{before}{tags.function}NAME{tags.named}\n",
        function_end=tags.function_end + after,
        parameter=f"{tags.parameter}KEY{closes.get(ANYTHING - STRING, closes[None])}{line}",
        parameter_end=f"{line}{tags.parameter_end}\n",
        string_parameter=f"{tags.parameter}KEY{closes.get(STRING, closes[None])}{line}",
    )
    call = text_parameters(texts)
    if tags.bare_functions:  # a block for each
        return Wording(lambda tool: sequence(f"{tags.block}\n", call(tool), f"\n{tags.block_end}"))
    return Wording(call, before=f"{tags.block}\n", after=f"\n{tags.block_end}")


class _Reading:
    """Of one text."""

    def __init__(self, tags: Tags, scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> None:
        self._tags = tags
        self._scan = scan
        self._writer = writer
        self._schemas = schemas

    def run(self) -> Steps[None]:
        while found := (yield from self._scan.until(self._tags.starts, self._writer.content)):
            before = self._writer.num_calls
            try:
                if found == self._tags.block:
                    yield from self._skip()
                    yield from self._scan.expect(self._tags.function)
                yield from self._functions()
            except Malformed:
                self._writer.no_markup()
            called = self._writer.num_calls > before
            yield from close(self._scan, self._writer, (self._tags.block_end,), called=called)

    def _skip(self) -> Steps[None]:
        yield from self._scan.skip_space()
        while self._tags.fillers and (yield from self._scan.try_text(*self._tags.fillers)):
            yield from self._scan.skip_space()

    def _functions(self) -> Steps[None]:
        """From the first one's name on."""
        more = self._tags.function
        while more:
            name = yield from self._name()
            yield from self._scan.expect(self._tags.named)
            self._writer.start(name)
            yield from self._parameters(name)
            yield from self._skip()
            more = yield from self._scan.try_text(self._tags.function)

    def _name(self) -> Steps[str]:
        name = (yield from self._scan.whole(NAME, LONGEST_NAME)).strip()
        if not name:
            raise Malformed
        return name

    def _parameters(self, function: str) -> Steps[None]:
        """Up to the function's end, or, where a value never ends, the text's."""
        arguments = TypedArguments(self._scan, self._writer)
        while True:
            try:
                yield from self._scan.skip_space()
                if (yield from self._scan.try_text(self._tags.function_end)):
                    break
                yield from self._scan.expect(self._tags.parameter)
                key = yield from self._name()
                types = self._tags.keyed[(yield from self._scan.expect(*self._tags.keyed))]
            except Malformed:
                arguments.close()
                raise
            arguments.key(key)
            if self._tags.on_lines:
                yield from self._scan.try_text("\n")
            if not (yield from arguments.value(types or self._schemas.types(function, key), self._tags.ends)):
                return
        self._scan.settle()
        arguments.close()
