"""Tool calls of Hunyuan 3:

<tool_calls>
<tool_call>add<tool_sep>
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
</tool_calls>

Published checkpoints write each tag's name with the suffix :opensource.
"""

from quire.services.frontend.output_processor.parsing.markup.key_value_calls import KeyValueTags, key_value_format

FORMAT = key_value_format(KeyValueTags(suffixes=("", ":opensource"), separator="tool_sep", block="tool_calls"))
