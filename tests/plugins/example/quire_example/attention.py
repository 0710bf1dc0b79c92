"""Attention backend: the reference implementation with a call counter."""

from __future__ import annotations

from typing import Any

from quire.services.worker.attention.reference import ReferenceAttention


class CountingAttention(ReferenceAttention):
    """Counts the calls of all its instances."""

    num_calls = 0

    def attend(self, *arguments: Any, **options: Any) -> Any:
        type(self).num_calls += 1
        return super().attend(*arguments, **options)
