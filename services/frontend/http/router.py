"""Routes of an API, which the app serves as they are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter


class Router(APIRouter):
    """A body is JSON whatever its content type says. (What an app sets for its routes reaches only those that FastAPI's
    include_router makes a second time.)"""

    def __init__(self, **settings: Any) -> None:
        super().__init__(strict_content_type=False, **settings)
