"""Batch of calls in a file, and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DAY_S = 86_400
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch as it is stored. `moments` are seconds since the epoch, by the status that began then."""

    id: str
    tenant: str
    key: str  # name of the API key that created it; empty where there are none
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    moments: Mapping[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def with_status(self, status: str, now: int, **changes: Any) -> Batch:
        return replace(self, status=status, moments={**self.moments, f"{status}_at": now}, **changes)

    def to_openai(self, *, is_cancelled: bool = False) -> dict[str, Any]:
        """Returns OpenAI's batch object with times in Unix seconds; with `is_cancelled` an unfinished batch is shown
        as cancelling."""
        moments = {f"{name}_at": None for name in ("in_progress", "finalizing", *sorted(ENDED), "cancelling")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": "cancelling" if is_cancelled and not self.has_ended else self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **moments,
            **self.moments,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
