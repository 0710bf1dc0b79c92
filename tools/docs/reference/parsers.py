"""Page of the tool parsers and the reasoning parsers."""

from __future__ import annotations

from quire.services.frontend.output_processor.parsing.registry import REASONING_PARSERS, TOOL_PARSERS
from tools.docs.reference.markdown import code, table

HEAD = """# Tool and reasoning parsers

`--tool-call-parser NAME` and `--reasoning-parser NAME` choose how the output of a model is read. The default finds the
parser from the chat template; `quire doctor MODEL` shows what it found. The names are vLLM's.
"""


def page() -> str:
    tools = table(("Tool parser",), ((code(name),) for name in sorted(TOOL_PARSERS)))
    reasoning = table(("Reasoning parser",), ((code(name),) for name in sorted(REASONING_PARSERS)))
    return f"{HEAD}\n## Tool parsers\n\n{tools}\n## Reasoning parsers\n\n{reasoning}"
