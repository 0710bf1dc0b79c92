"""Tool calls of DeepSeek V3 and R1-0528:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

import re
from dataclasses import replace

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.delimited_calls import arguments, fence
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ENDS = Markers(CALL_END, BLOCK_END, padding=fence)
KIND, FENCE = "function", "```json"
STARTS = (BLOCK, CALL)
MARKUP = CallMarkup(
    STARTS, (BLOCK_END,), inner_ends=(CALL_END,), stray_markup=re.compile(f"{KIND}{SEPARATOR}|{SEPARATOR}|{FENCE}")
)
NAME = re.compile(r"[^<>\n]+")


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda start: _calls(scan, writer, start))


def _calls(scan: Scanner, writer: EventWriter, start: str) -> Steps[None]:
    """Reads the calls from marker `start` on, with or without a kind and a fence. The block's end is left for the
    caller; raises Malformed for a call without name or arguments."""
    if start == BLOCK:
        yield from scan.skip_space()
        yield from scan.expect(CALL)
    more = CALL
    while more:
        name = yield from _name(scan)
        yield from scan.expect(SEPARATOR)
        if name == KIND:
            name = (yield from _name(scan)) or KIND
        yield from scan.skip_space()
        fenced = yield from scan.try_text(FENCE)
        if not name or not (fenced or (yield from scan.next_is("{", CALL_END))):
            raise Malformed
        if (yield from arguments(scan, writer, writer.start_call(name), ENDS)) == BLOCK_END:
            scan.at -= len(BLOCK_END)
            return
        scan.commit()
        yield from scan.skip_space()
        more = yield from scan.try_text(CALL)


def _name(scan: Scanner) -> Steps[str]:
    yield from scan.skip_space()
    return (yield from scan.read_run(NAME, LONGEST_NAME)).strip()


TOKENS = (BLOCK, BLOCK_END, CALL, SEPARATOR, CALL_END)
FENCED = json_arguments(f"{CALL}{KIND}{SEPARATOR}NAME\n{FENCE}\n", f"\n```{CALL_END}", quote=False)
BARE = json_arguments(f"{CALL}NAME{SEPARATOR}", CALL_END, quote=False)
FORMAT = ToolFormat(read, TOKENS, grammars=(CallGrammar(FENCED, before=BLOCK, after=BLOCK_END),), starts=STARTS)
V31 = replace(FORMAT, grammars=(CallGrammar(BARE, before=BLOCK, between="", after=BLOCK_END),))
