"""Page of the settings of each service."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from quire.shared.settings import SERVICES
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Settings

A service reads its settings from four places. A later place overrides an earlier one:

1. the default;
2. a YAML file with a section for each service (`--config FILE` or `QUIRE_CONFIG`);
3. the environment variable `QUIRE_<SERVICE>_<SETTING>`;
4. the flag of the command line: the name with hyphens in place of underscores.

In a variable or a flag, a list is written with commas, and a mapping as `NAME=VALUE,NAME=VALUE`. A name that no service
knows is an error.
"""


def page() -> str:
    """Returns the page: a table of settings per service."""
    parts = [HEAD]
    for service, model in SERVICES.items():
        rows = (_row(service, name, field) for name, field in model.model_fields.items())
        parts.append(f"## {service.capitalize()}\n\n" + table(("Setting", "Default", "Meaning"), rows))
    return "\n".join(parts)


def _row(service: str, name: str, field: FieldInfo) -> tuple[str, str, str]:
    """Returns a setting's cells: name, default, and description with its choices."""
    meaning = cell(field.description or "")
    if choices := ", ".join(_choices(field.annotation)):
        meaning += f" ({choices})"
    return code(name), _default(field), meaning


def _choices(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from (code(str(choice)) for choice in typing.get_args(annotation))


def _default(field: FieldInfo) -> str:
    """Returns a setting's default as code; "" for empty values and those that cannot be shown, "required" without
    one."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", (), {}) or not isinstance(value, str | int | float | tuple | dict):
        return ""
    return code(str(value))
