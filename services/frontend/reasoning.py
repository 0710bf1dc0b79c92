"""How much a model is to reason, in the words that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OFF = "none"


def variables(effort: str | None) -> Mapping[str, Any]:
    """enable_thinking as Qwen and GLM have it, thinking as DeepSeek and Granite, reasoning_effort as gpt-oss."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != OFF, "thinking": effort != OFF}
