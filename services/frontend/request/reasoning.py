"""Reasoning effort, in the variables that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.shared.errors import InvalidArgument

OFF = "none"
EFFORTS = (OFF, "minimal", "low", "medium", "high", "xhigh", "max")


def template_variables(effort: str | None) -> Mapping[str, Any]:
    """Returns the template variables for a reasoning effort: enable_thinking (Qwen, GLM), thinking (DeepSeek, Granite),
    reasoning_effort (gpt-oss); none for None. Raises InvalidArgument for an unknown effort."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        names = ", ".join(EFFORTS)
        raise InvalidArgument(f"reasoning_effort must be one of {names}, got {effort!r}", field="reasoning_effort")
    return {"reasoning_effort": effort, "enable_thinking": effort != OFF, "thinking": effort != OFF}
