"""MiniCPM5: <function name="add"><param name="a">1</param><param name="b"><![CDATA[two]]></param></function>"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import Tags, tagged

FORMAT = tagged(
    Tags(
        function='<function name="',
        named='">',
        function_end="</function>",
        parameter='<param name="',
        keyed={'">': None},
        parameter_end="</param>",
        literal=("<![CDATA[", "]]>"),
    ),
    "<function",
    "</function>",
    "<param",
    "</param>",
)
