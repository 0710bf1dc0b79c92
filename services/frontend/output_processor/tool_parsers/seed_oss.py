"""Tool calls of Seed-OSS: <seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format

FORMAT = tagged_format(
    CallTags(
        blocks=(("<seed:tool_call>", "</seed:tool_call>"),),
        function="<function=",
        named=">",
        function_end="</function>",
        parameter="<parameter=",
        keyed={">": None},
        parameter_end="</parameter>",
        on_lines=True,
    ),
    "<seed:tool_call>",
    "</seed:tool_call>",
)
