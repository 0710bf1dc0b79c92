"""xLAM: [{"name": "add", "arguments": {"a": 1}}] as the whole answer, bare or in a ```json fence."""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import Keys, calls, close
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.wording import Wording, json_arguments
from services.frontend.output_processor.parsing.writer import EventWriter

FENCE = "```json"
MARKERS = Markers("[TOOL_CALLS]", "<tool_call>", FENCE)
ENDS = ("```", "</tool_call>")
KEYS = Keys(others=("type",))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """It could be any JSON answer: only names of tools on offer count."""
    yield from scan.skip_space()
    while True:
        before = writer.num_calls
        try:
            yield from calls(scan, writer, KEYS, schemas.__contains__)
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, ENDS, called=writer.num_calls > before)
        if not (yield from scan.until(MARKERS, writer.content)):
            return


WORDING = Wording(json_arguments('{"name": NAME, "arguments": ', "}"), before="[", between=", ", after="]")
FORMAT = ToolFormat(read, (), wordings=(WORDING,), starts=("<tool_call>",))
