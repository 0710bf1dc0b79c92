"""An API key's name, tenant and permissions. Only the hash of the key is stored."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quire.shared.errors import InvalidArgument

Digest = bytes


def digest(key: bytes) -> Digest:
    """Returns the SHA-256 by which keys are stored and looked up; unpredictable, so lookup times reveal nothing."""
    return hashlib.sha256(key).digest()


class ApiKey(BaseModel):
    """Properties of a key, as stored in a file or in Redis next to its hash. For limits, 0 means none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$", description="for logs, metrics and refusals")
    tenant: str = Field("", max_length=256, description="tenant of its requests; empty: the key's name")
    models: tuple[str, ...] = Field((), description="models that it may request; empty: all")
    most_urgent_priority: int | None = Field(None, description="lowest priority value it may request; unset: any")
    highest_kv_priority: Literal["low", "normal", "high"] = Field(
        "high", description="highest KV priority it may request"
    )
    requests_per_minute: int = Field(0, ge=0, description="limit over all frontends with Redis, else per frontend")
    tokens_per_minute: int = Field(
        0, ge=0, description="the same for prompt and output tokens, counted when a request ends"
    )
    tokens_per_day: int = Field(0, ge=0, description="the same per UTC day")

    @model_validator(mode="before")
    @classmethod
    def _tenant_by_name(cls, values: Any) -> Any:
        """Fills in the key's name for a missing tenant, before validation."""
        if isinstance(values, dict) and not values.get("tenant"):
            return {**values, "tenant": values.get("name", "")}
        return values


def parse_key(values: Any, where: str) -> ApiKey:
    """Returns the key with the given properties. Raises InvalidArgument that names the field and never a secret."""
    try:
        return ApiKey.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"{where}: {field}: {first['msg']}", field="api_keys") from None
