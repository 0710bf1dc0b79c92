"""Reasoning of gpt-oss: messages with channels. analysis is reasoning; final, and commentary for the user, is content.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
"""

from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat
from quire.services.frontend.output_processor.parsing.markup.harmony import (
    ANALYSIS,
    CHANNEL,
    END,
    FINAL,
    MESSAGE,
    START,
    TOKENS,
    read_messages,
)
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

BUILT_IN = ("assistant", "browser", "python", "container", "user")  # recipients that are not functions


def read(scan: Scanner, writer: EventWriter, is_open: bool, _calls: CallProbe) -> Steps[None]:
    """Reads an answer without knowledge of the offered tools: every function may be one."""
    return read_messages(scan, writer, is_open, _may_be_function)


def _may_be_function(name: str) -> bool:
    return not name.startswith(BUILT_IN)


FORMAT = ReasoningFormat(
    read,
    TOKENS,
    starts=(f"{CHANNEL}{ANALYSIS}{MESSAGE}",),
    ends=(END,),
    after_end=f"{START}assistant",
    content_start=f"{CHANNEL}{FINAL}{MESSAGE}",
    read_answer=read_messages,
)
