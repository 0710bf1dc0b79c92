"""GLM 4.5 to 4.7:

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>

4.7 leaves the line breaks out.
"""

import re
from functools import partial

from quire.services.frontend.output_processor.parsing.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tagged_calls import padding_but_of
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.typed_arguments import TypedArguments
from quire.services.frontend.output_processor.parsing.wording import ParameterTexts, Wording, text_parameters
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[^<>{}\n]+")
VALUE_ENDS = Markers(VALUE_END, END, KEY, padding=padding_but_of(VALUE_END))
MARKUP = CallMarkup((START,), (END,), inner_ends=(VALUE_END,), scraps=re.compile("|".join((KEY, KEY_END, VALUE))))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda _start: _call(scan, writer, schemas))


def _call(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """A call from where its first parameter, an object of JSON or its end follows the name."""
    yield from scan.skip_space()
    name = (yield from scan.whole(NAME, LONGEST_NAME)).strip()
    yield from scan.skip_space()
    if not name or not (yield from scan.comes(KEY, END, "{")):
        raise Malformed
    arguments = TypedArguments(scan, writer, schemas, name)
    if (yield from scan.comes("{")):
        yield from arguments.body()
        yield from scan.skip_space()
    while (yield from scan.try_text(KEY)):
        key = (yield from scan.whole(NAME, LONGEST_NAME)).strip()
        yield from scan.expect(KEY_END)
        yield from scan.skip_space()
        yield from scan.try_text(VALUE)
        found = yield from arguments.parameter(key, None, VALUE_ENDS, partial(_ends_value, scan, arguments))
        if found != VALUE_END:
            scan.at -= len(found)
        yield from scan.skip_space()
    if not (yield from scan.comes(END)):
        raise Malformed
    arguments.end()
    writer.end_call()


def _ends_value(scan: Scanner, arguments: TypedArguments, marker: str) -> Steps[bool]:
    """A value's end is sometimes missing, or part of the value: what follows the marker decides."""
    if marker == KEY:
        try:
            name = (yield from scan.whole(NAME, LONGEST_NAME)).strip()
        except Malformed:
            return False
        return arguments.may_begin(name) and (yield from scan.comes(KEY_END))
    yield from scan.skip_space()
    followed = yield from scan.comes(*((KEY, END, START) if marker == VALUE_END else (START,)))
    return followed or not (yield from scan.peek())


TEXTS = ParameterTexts(
    function=f"{START}NAME\n",
    function_end=END,
    parameter=f"{KEY}KEY{KEY_END}\n{VALUE}",
    parameter_end=f"{VALUE_END}\n",
)
WORDING = Wording(text_parameters(TEXTS))
FORMAT = ToolFormat(read, (START, END, KEY, KEY_END, VALUE, VALUE_END), wordings=(WORDING,), starts=(START,))
