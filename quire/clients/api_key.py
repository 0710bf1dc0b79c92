"""API key of clients: given, or from the environment."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

VARIABLE = "QUIRE_API_KEY"


def with_api_key(stub: Any, api_key: str) -> Any:
    """Returns a stub whose calls send the key; the stub itself without a key."""
    key = api_key or os.environ.get(VARIABLE, "")
    return _Keyed(stub, (("authorization", f"Bearer {key}"),)) if key else stub


class _Keyed:
    """Stub that adds the API key's metadata to every call of another stub."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._metadata)
