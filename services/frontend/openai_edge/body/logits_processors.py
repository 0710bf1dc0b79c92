"""Conversion of `logits_processors`: names, each with an object of arguments or null."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def logits_processors(written: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, str] | None:
    """Returns the arguments as JSON text, as in sampling.proto."""
    if written is None:
        return None
    return {name: json.dumps(arguments or {}, ensure_ascii=False) for name, arguments in written.items()}
