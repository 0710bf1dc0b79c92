"""Calls whose arguments are pairs of elements: one with a parameter's name and one with its plain text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, ParameterTexts, text_parameters
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, Keys, calls
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import padding_but_of
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Padding, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values.typed_arguments import TypedArguments
from quire.services.frontend.output_processor.parsing.writer import EventWriter

NAME = re.compile(r"[^<>{}\n]+")
PLAIN = ("",)


@dataclass(frozen=True, slots=True)
class KeyValueTags:
    """Tags of a format."""

    suffixes: tuple[str, ...] = PLAIN  # suffixes of the tags' names, which may differ between checkpoints of a family
    separator: str = ""  # name of the tag between a function's name and its arguments
    block: str = ""  # name of the tag around all calls
    starts: tuple[str, ...] = field(init=False)
    ends: tuple[str, ...] = field(init=False)
    value_ends: tuple[str, ...] = field(init=False)
    after_value: Markers = field(init=False)
    markup: CallMarkup = field(init=False)

    def __post_init__(self) -> None:
        """Derives the markers and the call markup from the tags' names."""
        starts, ends, value_ends = self.tags("tool_call"), self.tags("/tool_call"), self.tags("/arg_value")
        after_value = Markers(*value_ends, *ends, *self.keys, padding=_padding(value_ends))
        blocks, block_ends = self.tags(self.block) if self.block else (), self.block_ends
        stray_markup = re.compile("|".join((*self.keys, *self.key_ends, *self.values, *self.separators)))
        markup = CallMarkup((*blocks, *starts), (*block_ends, *ends), inner_ends=value_ends, stray_markup=stray_markup)
        for name, value in (("starts", starts), ("ends", ends), ("value_ends", value_ends)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "after_value", after_value)
        object.__setattr__(self, "markup", markup)

    def tags(self, name: str) -> tuple[str, ...]:
        return tuple(f"<{name}{suffix}>" for suffix in self.suffixes)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.tags("arg_key")

    @property
    def key_ends(self) -> tuple[str, ...]:
        return self.tags("/arg_key")

    @property
    def values(self) -> tuple[str, ...]:
        return self.tags("arg_value")

    @property
    def block_ends(self) -> tuple[str, ...]:
        return self.tags(f"/{self.block}") if self.block else ()

    @property
    def separators(self) -> tuple[str, ...]:
        return self.tags(self.separator) if self.separator else ()


def _padding(value_ends: tuple[str, ...]) -> Padding:
    paddings = [padding_but_of(end) for end in value_ends]
    return lambda text, start, end: max(padding(text, start, end) for padding in paddings)


def key_value_format(tags: KeyValueTags) -> ToolFormat:
    """Returns the tool format with these tags, which reads their variants and has a grammar for each suffix."""

    def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
        yield from _CallReader(tags, scan, writer, schemas).read()

    inner = (*tags.separators, *tags.keys, *tags.key_ends, *tags.values, *tags.value_ends)
    grammars = tuple(_grammar(tags, suffix) for suffix in reversed(tags.suffixes))
    return ToolFormat(
        read, (*tags.markup.starts, *tags.markup.ends, *inner), grammars=grammars, starts=tags.markup.starts
    )


def _grammar(tags: KeyValueTags, suffix: str) -> CallGrammar:
    """Returns the grammar of required calls for one suffix of the tags; with a suffix it needs the tag as a token."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>" if name else ""

    texts = ParameterTexts(
        function=f"{tag('tool_call')}NAME{tag(tags.separator)}\n",
        function_end=tag("/tool_call"),
        parameter=f"{tag('arg_key')}KEY{tag('/arg_key')}\n{tag('arg_value')}",
        parameter_end=f"{tag('/arg_value')}\n",
    )
    needs = tag("tool_call") if suffix else ""
    if not tags.block:
        return CallGrammar(text_parameters(texts), needs=needs, trigger=tag("tool_call"), plain_texts=True)
    before, after = f"{tag(tags.block)}\n", "\n" + tag(f"/{tags.block}")
    call, trigger = text_parameters(texts), tag(tags.block)
    return CallGrammar(call, before=before, after=after, needs=needs, trigger=trigger, plain_texts=True)


class _CallReader:
    """Reader of the calls in one text."""

    def __init__(self, tags: KeyValueTags, scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> None:
        self._tags = tags
        self._scan = scan
        self._writer = writer
        self._schemas = schemas

    def read(self) -> Steps[None]:
        yield from call_blocks(self._scan, self._writer, self._tags.markup, self._calls)

    def _calls(self, start: str) -> Steps[None]:
        """Reads from after a call's start up to its end, or from after a block's start up to the block's end."""
        if start in self._tags.starts:
            yield from self._call()
            return
        yield from self._scan.skip_space()
        yield from self._scan.expect(*self._tags.starts)
        more = True
        while more:
            yield from self._call()
            yield from self._scan.try_text(*self._tags.ends)
            self._scan.commit()
            yield from self._scan.skip_space()
            more = bool((yield from self._scan.try_text(*self._tags.starts)))

    def _call(self) -> Steps[None]:
        """Reads a call, which a parameter, a JSON object or its end must follow after the name, or a call of an
        offered tool as JSON, as most other formats write it."""
        tags, scan = self._tags, self._scan
        yield from scan.skip_space()
        if (yield from scan.next_is("{")):
            yield from calls(scan, self._writer, Keys(), self._schemas.__contains__)
            return
        name = (yield from scan.read_run(NAME, LONGEST_NAME)).strip()
        if tags.separators:
            yield from scan.try_text(*tags.separators)
        yield from scan.skip_space()
        if not name or not (yield from scan.next_is(*tags.keys, *tags.markup.ends, "{")):
            raise Malformed
        arguments = TypedArguments(scan, self._writer, self._schemas, name)
        if (yield from scan.next_is("{")):
            yield from arguments.body()
            yield from scan.skip_space()
        while (yield from scan.try_text(*tags.keys)):
            yield from self._pair(arguments)
        if not (yield from scan.next_is(*tags.markup.ends)):
            raise Malformed
        arguments.end()
        self._writer.end_call()

    def _pair(self, arguments: TypedArguments) -> Steps[None]:
        """Reads one key and its value. A marker that ends the value but is not its end tag is left for the caller."""
        tags, scan = self._tags, self._scan
        key = (yield from scan.read_run(NAME, LONGEST_NAME)).strip()
        yield from scan.expect(*tags.key_ends)
        yield from scan.skip_space()
        yield from scan.try_text(*tags.values)
        marker = yield from arguments.parameter(key, None, tags.after_value, partial(self._ends_value, arguments))
        if marker not in tags.value_ends:
            scan.at -= len(marker)
        yield from scan.skip_space()

    def _ends_value(self, arguments: TypedArguments, marker: str) -> Steps[bool]:
        """Returns whether a marker ends the value. A value's end may be missing or part of the value, so that what
        follows decides."""
        tags, scan = self._tags, self._scan
        if marker in tags.keys:
            try:
                name = (yield from scan.read_run(NAME, LONGEST_NAME)).strip()
            except Malformed:
                return False
            return arguments.may_begin(name) and (yield from scan.next_is(*tags.key_ends))
        yield from scan.skip_space()
        inside = (*tags.keys, *tags.ends) if marker in tags.value_ends else ()
        followed = yield from scan.next_is(*inside, *tags.starts, *tags.block_ends)
        return followed or not (yield from scan.peek())
