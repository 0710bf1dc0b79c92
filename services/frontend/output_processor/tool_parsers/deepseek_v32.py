"""Tool calls of DeepSeek V3.2; V4 writes tool_calls as the outer tag, and either parser reads both:

<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import CallTags, tagged_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ANYTHING
from quire.services.frontend.output_processor.parsing.values.typed_arguments import STRING

MARK = "｜DSML｜"
MISSPELLED_MARKS = ("｜｜DSML｜｜", "‖DSML‖", "|DSML|")  # with bars that look alike


def _tags(mark: str, *blocks: str) -> CallTags:
    """Returns the tags with the given mark and names of the outer block."""
    return CallTags(
        blocks=tuple((f"<{mark}{block}>", f"</{mark}{block}>") for block in blocks),
        function=f'<{mark}invoke name="',
        named='">',
        function_end=f"</{mark}invoke>",
        parameter=f'<{mark}parameter name="',
        keyed={'">': None, '" string="true">': STRING, '" string="false">': ANYTHING - STRING},
        parameter_end=f"</{mark}parameter>",
    )


def _format(*blocks: str) -> ToolFormat:
    misspelled = tuple(_tags(mark, *blocks) for mark in MISSPELLED_MARKS)
    return tagged_format(_tags(MARK, *blocks), MARK, misspelled=misspelled)


FORMAT = _format("function_calls", "tool_calls")
V4 = _format("tool_calls", "function_calls")
