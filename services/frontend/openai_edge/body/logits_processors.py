"""`logits_processors` of a body: names, each with an object of arguments or null."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def logits_processors(written: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, str] | None:
    """As sampling.proto has them: arguments as text."""
    if written is None:
        return None
    return {name: json.dumps(arguments or {}, ensure_ascii=False) for name, arguments in written.items()}
