"""Tool calls of MiniCPM5: <function name="add"><param name="a">1</param><param
name="b"><![CDATA[two]]></param></function>

Models also write <tool_call> and </tool_call> around it.
"""

from dataclasses import replace

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format

BARE = CallTags(
    function='<function name="',
    named='">',
    function_end="</function>",
    parameter='<param name="',
    keyed={'">': None},
    parameter_end="</param>",
    literal=("<![CDATA[", "]]>"),
)
TOKENS = ("<function", "</function>", "<param", "</param>")
FORMAT = replace(
    tagged_format(replace(BARE, blocks=(("<tool_call>", "</tool_call>"),)), *TOKENS),
    grammars=tagged_format(BARE, *TOKENS).grammars,
)
