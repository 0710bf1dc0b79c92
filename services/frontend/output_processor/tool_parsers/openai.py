"""Tool calls of gpt-oss: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

Reasoning is parsed as well: it is a message like a call, in another channel.
"""

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    START,
    TOKENS,
    read_messages,
)
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return read_messages(scan, writer, False, schemas.__contains__)


GRAMMAR = CallGrammar(
    json_arguments(f"{CHANNEL}commentary to={FUNCTIONS}NAME {CONSTRAIN}json{MESSAGE}", "", quote=False),
    between=f"{CALL}{START}assistant",
)
FORMAT = ToolFormat(read, TOKENS, grammars=(GRAMMAR,), read_answer=read_messages)
