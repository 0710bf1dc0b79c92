"""The API key that clients show: theirs, or the one in the environment."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

VARIABLE = "QUIRE_API_KEY"


def with_api_key(stub: Any, api_key: str) -> Any:
    """`stub`, each of whose calls shows the key; as it is where there is none."""
    key = api_key or os.environ.get(VARIABLE, "")
    return _Keyed(stub, (("authorization", f"Bearer {key}"),)) if key else stub


class _Keyed:
    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._metadata)
