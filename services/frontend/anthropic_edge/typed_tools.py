"""Tools that Anthropic's API identifies by a type with a date, as in bash_20250124.

Those that the client runs have a schema that Anthropic's models were trained on; here it is written out. Those that the
API runs are not shown to the model: clients list them together with other tools and continue without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
LINES: Schema = {"type": "array", "items": {"type": "integer"}, "description": "first and last line; -1: the end"}
PATH: Schema = {"type": "string", "description": "absolute path of a file or folder"}

# Types run by Anthropic's servers, without the date.
RUN_BY_SERVER = (
    "advisor_", "code_execution_", "mcp_toolset", "tool_search_tool_", "web_fetch_", "web_search_",
)  # fmt: skip


def _commands(*names: str, **more: Schema) -> Schema:
    """Returns the schema of a tool with an enumerated command, a path, and `more` optional properties."""
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": [*names]}, "path": PATH, **more},
        "required": ["command"],
    }


BASH: Schema = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "command line to run"},
        "restart": {"type": "boolean", "description": "true: start the shell anew instead"},
    },
}
EDITS: Schema = {
    "file_text": {"type": "string", "description": "content of the file that create writes"},
    "old_str": {"type": "string", "description": "text that str_replace replaces; it occurs once in the file"},
    "new_str": TEXT,
    "insert_line": {"type": "integer", "description": "line after which insert puts its text; 0: at the beginning"},
    "view_range": LINES,
}
EDITOR: Schema = _commands("view", "create", "str_replace", "insert", **EDITS, insert_text=TEXT)
EDITOR_WITH_UNDO: Schema = _commands("view", "create", "str_replace", "insert", "undo_edit", **EDITS)
MEMORY: Schema = _commands(
    "view", "create", "str_replace", "insert", "delete", "rename",
    **EDITS, insert_text=TEXT, old_path=PATH, new_path=PATH,
)  # fmt: skip

SHELL = "Runs commands in a shell that keeps its state between calls."
FILES = "Views, creates and edits text files."
# By type: description and schema of tools that the client runs.
RUN_BY_CLIENT: Mapping[str, tuple[str, Schema]] = {
    "bash_20241022": (SHELL, BASH),
    "bash_20250124": (SHELL, BASH),
    "memory_20250818": ("Keeps notes in files below /memories between conversations.", MEMORY),
    "text_editor_20241022": (FILES, EDITOR_WITH_UNDO),
    "text_editor_20250124": (FILES, EDITOR_WITH_UNDO),
    "text_editor_20250429": (FILES, EDITOR),
    "text_editor_20250728": (FILES, EDITOR),
}


def is_run_by_server(kind: str) -> bool:
    return kind.startswith(RUN_BY_SERVER)
