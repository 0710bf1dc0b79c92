"""Tool calls of Muse Glimmer, each in a message to the tool, whose header the parser of reasoning reads:

 to=add<|message|><atem:function_calls>
<atem:invoke name="add">
<atem:parameter name="a">1</atem:parameter>
</atem:invoke>
</atem:function_calls><|eom|><|start|>assistant

A name may have a namespace before it, often its own once more (add.add).
"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, Json, sequence
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format
from quire.services.frontend.output_processor.reasoning_parsers.muse_glimmer import (
    END,
    MESSAGE,
    ROLE,
    START,
    TO,
    TOKENS,
)
from quire.services.frontend.request.request import Tool

BLOCK, BLOCK_END = "<atem:function_calls>", "</atem:function_calls>"
TAGGED = tagged_format(
    CallTags(
        blocks=((BLOCK, BLOCK_END),),
        function='<atem:invoke name="',
        named='">',
        function_end="</atem:invoke>",
        parameter='<atem:parameter name="',
        keyed={'">': None},
        parameter_end="</atem:parameter>",
        has_namespaces=True,
    ),
    *TOKENS,
)


def _call(tool: Tool) -> Json:
    """Returns the format of one message to the tool."""
    return sequence(f" {TO}{tool.name}{MESSAGE}{BLOCK}\n", TAGGED.grammars[0].call(tool), f"\n{BLOCK_END}")


GRAMMAR = CallGrammar(_call, between=f"{END}{START}{ROLE}", plain_texts=True)
FORMAT = replace(TAGGED, grammars=(GRAMMAR,))
