"""gpt-oss: messages with channels. analysis is reasoning; final, and commentary for nobody, is content; what has a
recipient is a call, which is left as it is for the tool parser `openai`.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
"""

from services.frontend.output_processor.parsing.call_probe import CallProbe
from services.frontend.output_processor.parsing.formats import ReasoningFormat
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Sink, Steps
from services.frontend.output_processor.parsing.tagged_calls import no_padding
from services.frontend.output_processor.parsing.writer import EventWriter
from services.frontend.output_processor.tool_parsers import openai

BODY_ENDS = Markers(openai.END, openai.CALL, openai.RETURN, openai.START)
CUT_HEADERS = (openai.END, openai.CALL, openai.RETURN)
CALL_ENDS = Markers(openai.END, openai.CALL, openai.RETURN, openai.START, padding=no_padding)


def read(scan: Scanner, writer: EventWriter, _is_open: bool, _calls: CallProbe) -> Steps[None]:
    while (yield from scan.until(openai.STARTS, writer.content)):
        try:
            header = yield from openai.header(scan)
        except Malformed:
            if scan.unsettled.endswith(CUT_HEADERS) or (yield from scan.comes(openai.START)):
                scan.settle()  # a header without a message says nothing to the user
            writer.no_markup()
            continue
        if header.recipient:
            writer.no_markup()
            yield from _body(scan, CALL_ENDS, writer.content)
            writer.no_markup()
        else:
            scan.settle()
            yield from _body(scan, BODY_ENDS, writer.reasoning if header.channel == "analysis" else writer.content)
            scan.settle()


def _body(scan: Scanner, ends: Markers, sink: Sink) -> Steps[None]:
    if (yield from scan.until(ends, sink)) == openai.START:
        scan.at -= len(openai.START)


FORMAT = ReasoningFormat(
    read,
    openai.TOKENS,
    starts=(f"{openai.CHANNEL}analysis{openai.MESSAGE}",),
    ends=(openai.END,),
    after_end=f"{openai.START}assistant",
    content_start=f"{openai.CHANNEL}final{openai.MESSAGE}",
)
