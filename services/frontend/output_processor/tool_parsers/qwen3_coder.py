"""Tool calls of Qwen3-Coder, Qwen3.5, MiMo, Step 3.5, Nemotron 3:

<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format

FORMAT = tagged_format(
    CallTags(
        blocks=(("<tool_call>", "</tool_call>"),),
        function="<function=",
        named=">",
        function_end="</function>",
        parameter="<parameter=",
        keyed={">": None},
        parameter_end="</parameter>",
        on_lines=True,
        bare_functions=True,
    ),
    "<tool_call>",
    "</tool_call>",
)
