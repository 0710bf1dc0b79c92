"""Calls written with tags: one around the function and one around each parameter's plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from quire.services.frontend.output_processor.parsing.call_grammar import (
    CallGrammar,
    ParameterTexts,
    sequence,
    text_parameters,
)
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks, merged
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, Keys, calls
from quire.services.frontend.output_processor.parsing.scanner import (
    Malformed,
    Markers,
    Padding,
    Scanner,
    Steps,
    one_newline,
)
from quire.services.frontend.output_processor.parsing.tool_schemas import ANYTHING, ToolSchemas
from quire.services.frontend.output_processor.parsing.values.typed_arguments import STRING, TypedArguments
from quire.services.frontend.output_processor.parsing.writer import EventWriter

NAME = re.compile(r"[^<>\"\n]+")

Types = frozenset[str] | None


def padding_but_of(own: str) -> Padding:
    """Returns the padding of values that do not stand on separate lines.

    A line break belongs to any marker other than the value's `own` end marker.
    """

    def padding(text: str, start: int, end: int) -> int:
        return end if text.startswith(own, end) else one_newline(text, start, end)

    return padding


def no_padding(_text: str, _start: int, end: int) -> int:
    """Returns no padding: white space at the end of a value is significant."""
    return end


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of a format. Names stand between `function` and `named`, and between `parameter` and one of `keyed`."""

    function: str
    named: str
    function_end: str
    parameter: str
    keyed: Mapping[str, Types]  # each with the types of the value after it; None: the tool's schema determines them
    parameter_end: str
    blocks: tuple[tuple[str, str], ...] = ()  # starts and ends around functions; grammars use the first
    literal: tuple[str, ...] = ()  # around a value that contains markup
    fillers: tuple[str, str] | tuple[()] = ()  # before and after a function, without meaning
    on_lines: bool = False  # values stand on separate lines: the line breaks around them are not part of them
    bare_functions: bool = False  # a block for each function
    has_namespaces: bool = False  # names may have a namespace and a dot before them
    value_ends: Markers = field(init=False)
    markup: CallMarkup = field(init=False)

    def __post_init__(self) -> None:
        """Derives the ends of values and the call markup from the tags."""
        padding = one_newline if self.on_lines else padding_but_of(self.parameter_end)
        ends = Markers(self.parameter_end, self.function_end, self.parameter, padding=padding)
        object.__setattr__(self, "value_ends", ends)
        starts = (*self.block_starts, self.function)  # the block's tag is sometimes missing or misspelled
        inner_ends = (self.parameter_end, self.function_end)
        markup = CallMarkup(starts, self.block_ends, self.fillers, inner_ends, (self.parameter,), self._stray_markup())
        object.__setattr__(self, "markup", markup)

    @property
    def block_starts(self) -> tuple[str, ...]:
        return tuple(start for start, _ in self.blocks)

    @property
    def block_ends(self) -> tuple[str, ...]:
        return tuple(end for _, end in self.blocks)

    def _stray_markup(self) -> re.Pattern[str]:
        """Returns the pattern of tags that are removed from the content where they belong to no call."""
        keyed = "|".join(map(re.escape, sorted(self.keyed, key=len, reverse=True)))
        opening = (
            rf"{re.escape(self.function)}{NAME.pattern}(?:{re.escape(self.named)})?",
            rf"{re.escape(self.parameter)}{NAME.pattern}(?:{keyed})?",
        )
        return re.compile("|".join((*opening, *map(re.escape, (*self.fillers, *self.literal)))))

    @property
    def after_parameter(self) -> tuple[str, ...]:
        """Returns the texts that may follow a parameter's end."""
        return (self.parameter, *dict.fromkeys((self.function_end, *self.block_ends, *self.markup.starts)))

    @property
    def after_function(self) -> tuple[str, ...]:
        """Returns the texts that may follow a function's end."""
        return (self.function, *self.block_ends, *self.block_starts, *self.fillers)


def tagged_format(tags: CallTags, *tokens: str, misspelled: tuple[CallTags, ...] = ()) -> ToolFormat:
    """Returns the tool format with these tags; `tokens` are the special tokens that must be kept in the text.

    `misspelled`: the same tags as models also write them; calls in them are read alike.
    """
    spellings = (tags, *misspelled)
    tags_of = {start: spelling for spelling in spellings for start in spelling.markup.starts}
    markup = merged([spelling.markup for spelling in spellings])

    def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
        """Reads content and calls, each call with the tags that its start belongs to."""

        def functions(start: str) -> Steps[None]:
            yield from _CallReader(tags_of[start], scan, writer, schemas).functions(start)

        yield from call_blocks(scan, writer, markup, functions)

    return ToolFormat(read, tokens, grammars=(_grammar(tags),), starts=markup.starts)


def _grammar(tags: CallTags) -> CallGrammar:
    """Returns the grammar of required calls, in the tags' block if there is one, or in a block for each function."""
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
    if not tags.blocks:
        return CallGrammar(call, plain_texts=True)
    start, end = tags.blocks[0]
    if tags.bare_functions:  # a block for each function
        return CallGrammar(lambda tool: sequence(f"{start}\n", call(tool), f"\n{end}"), plain_texts=True)
    return CallGrammar(call, before=f"{start}\n", after=f"\n{end}", plain_texts=True)


class _CallReader:
    """Reader of the calls in one text."""

    def __init__(self, tags: CallTags, scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> None:
        self._tags = tags
        self._scan = scan
        self._writer = writer
        self._schemas = schemas

    def functions(self, start: str) -> Steps[None]:
        """Reads functions, one after another, from after the start of a block or of a function, as `start` says. A
        block may hold calls of offered tools as JSON instead, as most other formats write them."""
        if start != self._tags.function:
            yield from self._skip()
            while (yield from self._scan.try_text(*self._tags.block_starts)):  # models repeat it
                yield from self._skip()
            if (yield from self._scan.next_is("{")):
                yield from calls(self._scan, self._writer, Keys(), self._schemas.__contains__)
                return
            yield from self._scan.expect(self._tags.function)
        more = self._tags.function
        while more:
            name = yield from self._name()
            yield from self._scan.expect(self._tags.named)
            yield from self._function(self._schemas.without_namespace(name) if self._tags.has_namespaces else name)
            yield from self._skip()
            more = yield from self._scan.try_text(self._tags.function)

    def _skip(self) -> Steps[None]:
        yield from self._scan.skip_space()
        while self._tags.fillers and (yield from self._scan.try_text(*self._tags.fillers)):
            yield from self._scan.skip_space()

    def _name(self) -> Steps[str]:
        """Reads a function's or parameter's name, stripped; raises Malformed if it is empty."""
        name = (yield from self._scan.read_run(NAME, LONGEST_NAME)).strip()
        if not name:
            raise Malformed
        return name

    def _function(self, name: str) -> Steps[None]:
        """Reads a function's parameters, or a JSON object in their place, up to the end of the function or the
        block."""
        arguments = TypedArguments(self._scan, self._writer, self._schemas, name)
        yield from self._scan.skip_space()
        if (yield from self._scan.next_is("{")):
            yield from arguments.body()
            yield from self._scan.skip_space()
        while (yield from self._comes_parameter()):
            if (yield from self._scan.try_text(self._tags.parameter)):
                yield from self._parameter(arguments)
            else:
                yield from self._named_tag(arguments)
            yield from self._scan.skip_space()
        arguments.end()
        self._writer.end_call()

    def _comes_parameter(self) -> Steps[bool]:
        """Returns whether a parameter follows; at the end False, and the function's end marker is consumed."""
        ended = yield from self._scan.try_text(self._tags.function_end)
        if ended or (self._tags.blocks and (yield from self._scan.next_is(*self._tags.block_ends))):
            return False
        if not (yield from self._scan.next_is("<")):
            raise Malformed
        return True

    def _parameter(self, arguments: TypedArguments) -> Steps[None]:
        """Reads one parameter with a plain or literal value. A marker that ends the value but is not its end tag is
        left for the caller."""
        key = yield from self._name()
        types = self._tags.keyed[(yield from self._scan.expect(*self._tags.keyed))]
        if self._tags.literal and (yield from self._scan.try_text(self._tags.literal[0])):
            yield from self._literal(arguments, key, types)
            return
        if self._tags.on_lines:
            yield from self._scan.try_text("\n")
        marker = yield from arguments.parameter(key, types, self._tags.value_ends, partial(self._ends_value, arguments))
        if marker != self._tags.parameter_end:
            self._scan.at -= len(marker)

    def _literal(self, arguments: TypedArguments, key: str, types: Types) -> Steps[None]:
        """Reads a value that may contain the end of a parameter or function, up to the end of the literal."""
        end = Markers(self._tags.literal[-1], padding=no_padding)
        yield from arguments.parameter(key, types, end, self._ends_literal)
        yield from self._scan.skip_space()
        yield from self._scan.try_text(self._tags.parameter_end)

    def _ends_literal(self, _marker: str) -> Steps[bool]:
        yield from self._scan.skip_space()
        followed = yield from self._scan.next_is(self._tags.parameter_end, *self._tags.after_parameter)
        return followed or not (yield from self._scan.peek())

    def _named_tag(self, arguments: TypedArguments) -> Steps[None]:
        """Reads a parameter in a tag of the parameter's name; any other complete tag is not consumed."""
        begin = self._scan.at
        try:
            yield from self._scan.expect("<")
            name = yield from self._name()
            yield from self._scan.expect(">")
            if not arguments.may_begin(name):
                raise Malformed
        except Malformed:
            if (yield from self._scan.peek()):
                self._scan.at = begin
            raise
        padding = one_newline if self._tags.on_lines else no_padding
        if self._tags.on_lines:
            yield from self._scan.try_text("\n")
        yield from arguments.parameter(name, None, Markers(f"</{name}>", padding=padding))

    def _ends_value(self, arguments: TypedArguments, marker: str) -> Steps[bool]:
        """Returns whether a marker ends the value. A value's end may be missing or part of the value, so that what
        follows decides."""
        if marker == self._tags.parameter:
            try:
                name = yield from self._name()
            except Malformed:
                return False
            return arguments.may_begin(name) and (yield from self._scan.next_is(*self._tags.keyed))
        is_own = marker == self._tags.parameter_end
        yield from self._scan.skip_space()
        followed = yield from self._scan.next_is(*(self._tags.after_parameter if is_own else self._tags.after_function))
        return followed or not (yield from self._scan.peek())
