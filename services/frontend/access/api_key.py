"""An API key: whose it is, and what it is good for. Never the key itself, only its hash."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quire.shared.errors import InvalidArgument

Digest = bytes


def digest(shown: bytes) -> Digest:
    """What keys are kept and looked up by: as good as random, so that no time that a lookup takes says anything."""
    return hashlib.sha256(shown).digest()


class ApiKey(BaseModel):
    """As it stands in a file or in Redis, beside its hash. Limits: 0 means none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$", description="for logs, metrics and refusals")
    tenant: str = Field("", max_length=256, description="whom its work is done for; the key's name if empty")
    models: tuple[str, ...] = Field((), description="names that it may ask for; empty: all")
    most_urgent_priority: int | None = Field(None, description="the smallest priority it may ask for; unset: any")
    highest_kv_priority: Literal["low", "normal", "high"] = Field("high", description="that it may ask for")
    requests_per_minute: int = Field(0, ge=0, description="at all frontends together, with Redis; else at each")
    tokens_per_minute: int = Field(0, ge=0, description="the same for prompts and outputs, counted at the end")
    tokens_per_day: int = Field(0, ge=0, description="the same for a day of UTC")

    @model_validator(mode="before")
    @classmethod
    def _tenant_by_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("tenant"):
            return {**values, "tenant": values.get("name", "")}
        return values


def parse_key(values: Any, where: str) -> ApiKey:
    """Raises InvalidArgument that names the field, and never a secret."""
    try:
        return ApiKey.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"{where}: {field}: {first['msg']}", field="api_keys") from None
