"""How much a model is to reason, in the words that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.shared.errors import InvalidArgument

OFF = "none"
EFFORTS = (OFF, "minimal", "low", "medium", "high", "xhigh", "max")


def template_variables(effort: str | None) -> Mapping[str, Any]:
    """enable_thinking as Qwen and GLM have it, thinking as DeepSeek and Granite, reasoning_effort as gpt-oss."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        names = ", ".join(EFFORTS)
        raise InvalidArgument(f"reasoning_effort must be one of {names}, got {effort!r}", field="reasoning_effort")
    return {"reasoning_effort": effort, "enable_thinking": effort != OFF, "thinking": effort != OFF}
