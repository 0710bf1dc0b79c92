"""Tool calls of MiniMax M2: <minimax:tool_call><invoke name="add"><parameter
name="a">1</parameter></invoke></minimax:tool_call>"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format

FORMAT = tagged_format(
    CallTags(
        blocks=(("<minimax:tool_call>", "</minimax:tool_call>"), ("<tool_calls>", "</tool_calls>")),  # M1's as well
        function='<invoke name="',
        named='">',
        function_end="</invoke>",
        parameter='<parameter name="',
        keyed={'">': None},
        parameter_end="</parameter>",
    ),
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)
