"""Llama 3.1 to 3.3 and 4: {"name": "add", "parameters": {"a": 1}} as the whole answer, with or without <|python_tag|>
in front, several with ; between them."""

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import Keys, any_name, calls, close
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.wording import Wording, json_arguments
from services.frontend.output_processor.parsing.writer import EventWriter

TAG = "<|python_tag|>"
MARKERS = Markers(TAG)
KEYS = Keys(others=("type", "function"))


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Without the tag it could be any JSON answer: only names of tools on offer count."""
    yield from scan.skip_space()
    is_name = any_name if (yield from scan.try_text(TAG)) else schemas.__contains__
    while True:
        before = writer.num_calls
        try:
            yield from calls(scan, writer, KEYS, is_name, between=";")
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, (), called=writer.num_calls > before)
        if not (yield from scan.until(MARKERS, writer.content)):
            return
        is_name = any_name


WORDING = Wording(json_arguments('{"name": NAME, "parameters": ', "}"), between="; ")
FORMAT = ToolFormat(read, (TAG,), wordings=(WORDING,), starts=(TAG,))
