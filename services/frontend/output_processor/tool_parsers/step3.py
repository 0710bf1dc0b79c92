"""Tool calls of Step 3: <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">
<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format

BLOCK, BLOCK_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
FORMAT = tagged_format(
    CallTags(
        blocks=((BLOCK, BLOCK_END),),
        function='<steptml:invoke name="',
        named='">',
        function_end="</steptml:invoke>",
        parameter='<steptml:parameter name="',
        keyed={'">': None},
        parameter_end="</steptml:parameter>",
        fillers=(f"{CALL}function{SEPARATOR}", CALL_END),
    ),
    BLOCK,
    BLOCK_END,
    CALL,
    SEPARATOR,
    CALL_END,
)
