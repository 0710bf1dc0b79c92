"""What outlives an attachment: told to the scheduler with the next hello."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.shared.models.adapter_ids import AdapterId

if TYPE_CHECKING:  # this module is also read where there is no torch
    from quire.services.worker.models.loading.weights import WeightsId


@dataclass(frozen=True, slots=True)
class RetainedState:
    """Blocks of known content, and what else a worker keeps between attachments."""

    block_ids: list[int]
    hashes: bytes  # 32 bytes each, same order
    groups: list[int] = field(default_factory=list)  # KV group of each, same order; none: all of the first
    in_host_memory: dict[int, bytes] = field(default_factory=dict)  # names (shared/kv/block_hash.py), by place
    on_disk: dict[int, bytes] = field(default_factory=dict)  # the same, the least recently written first
    adapters: Sequence[tuple[AdapterId, str]] = ()  # and where they were read, of one name the newest last
    asleep: Sequence[str] = ()
    sleep_level: int = 0
    weights: WeightsId | None = None  # that the next step is computed with; None where they cannot be changed
