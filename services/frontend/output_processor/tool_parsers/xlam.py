"""Tool calls of xLAM: [{"name": "add", "arguments": {"a": 1}}] as the whole answer, bare or in a ```json fence."""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import read_call_end, reject_call
from quire.services.frontend.output_processor.parsing.markup.json_calls import Keys, calls
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

FENCE = "```json"
STARTS = ("[TOOL_CALLS]", "<tool_call>", FENCE)
MARKERS = Markers(*STARTS)
ENDS = ("```", "</tool_call>")
KEYS = Keys(others=("type",))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads JSON tool calls at the beginning of the answer and after every marker. JSON without the name of an offered
    tool is content, as is all other text."""
    yield from scan.skip_space()
    is_marker = yield from scan.next_is(*STARTS)
    while True:
        before = writer.num_calls
        try:
            if not is_marker:
                yield from calls(scan, writer, KEYS, schemas.__contains__)
        except Malformed:
            reject_call(scan, writer, called=writer.num_calls > before)
        yield from read_call_end(scan, writer, ENDS, called=writer.num_calls > before)
        if not (yield from scan.read_until(MARKERS, writer.content)):
            return
        is_marker = False


GRAMMAR = CallGrammar(json_arguments('{"name": NAME, "arguments": ', "}"), before="[", between=", ", after="]")
FORMAT = ToolFormat(read, (), grammars=(GRAMMAR,), starts=("<tool_call>",))
