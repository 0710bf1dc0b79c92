"""Tool calls of Apertus: <|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import json_repair, json_text
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, END = "<|tools_prefix|>", "<|tools_suffix|>"
MARKUP = CallMarkup((START,), (END,))


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda _start: _calls(scan, writer))


def _calls(scan: Scanner, writer: EventWriter) -> Steps[None]:
    """Reads the list of objects with one key, the name, and its arguments; raises Malformed for other JSON."""
    yield from scan.skip_space()
    yield from scan.expect("[")
    more = ","
    while more == ",":
        yield from scan.skip_space()
        yield from scan.expect("{")
        yield from scan.skip_space()
        name = yield from json_text.short_string(scan, LONGEST_NAME)
        yield from scan.skip_space()
        yield from scan.expect(":")
        yield from scan.skip_space()
        if not name or not (yield from scan.next_is("{")):
            raise Malformed
        yield from json_repair.value(scan, writer.start_call(name))
        writer.end_call()
        yield from scan.skip_space()
        yield from scan.expect("}")
        scan.commit()
        yield from scan.skip_space()
        more = yield from scan.expect(",", "]")
    scan.commit()


GRAMMAR = CallGrammar(json_arguments("{NAME: ", "}"), before=f"{START}[", between=", ", after=f"]{END}")
FORMAT = ToolFormat(read, (START, END), grammars=(GRAMMAR,), starts=(START,))
