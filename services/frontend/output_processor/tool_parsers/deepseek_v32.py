"""Tool calls of DeepSeek V3.2; V4 writes tool_calls as the outer tag, and either parser reads both:

<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ANYTHING
from quire.services.frontend.output_processor.parsing.values.typed_arguments import STRING

MARK = "｜DSML｜"


def _tags(*blocks: str) -> CallTags:
    """Returns the tags with the given names of the outer block."""
    return CallTags(
        blocks=tuple((f"<{MARK}{block}>", f"</{MARK}{block}>") for block in blocks),
        function=f'<{MARK}invoke name="',
        named='">',
        function_end=f"</{MARK}invoke>",
        parameter=f'<{MARK}parameter name="',
        keyed={'">': None, '" string="true">': STRING, '" string="false">': ANYTHING - STRING},
        parameter_end=f"</{MARK}parameter>",
    )


FORMAT = tagged_format(_tags("function_calls", "tool_calls"), MARK)
V4 = tagged_format(_tags("tool_calls", "function_calls"), MARK)
