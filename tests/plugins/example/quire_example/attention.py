"""A backend: the reference, counted."""

from __future__ import annotations

from typing import Any

from quire.services.worker.attention.reference import ReferenceAttention


class CountingAttention(ReferenceAttention):
    """Counts calls, of all its instances."""

    num_calls = 0

    def attend(self, *arguments: Any, **options: Any) -> Any:
        type(self).num_calls += 1
        return super().attend(*arguments, **options)
