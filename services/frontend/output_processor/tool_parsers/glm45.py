"""Tool calls of GLM 4.5 to 4.7:

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>

4.7 omits the line breaks.
"""

from quire.services.frontend.output_processor.parsing.markup.key_value_calls import KeyValueTags, key_value_format

FORMAT = key_value_format(KeyValueTags())
