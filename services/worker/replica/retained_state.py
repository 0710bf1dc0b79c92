"""State that a worker retains between attachments and reports in the next hello."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.shared.models.adapter_ids import AdapterId

if TYPE_CHECKING:  # this module is also imported without torch
    from quire.services.worker.models.loading.weights import WeightsId


@dataclass(frozen=True, slots=True)
class RetainedState:
    """Blocks of known content, adapters, sleep state and weights that outlive an attachment."""

    block_ids: list[int]
    hashes: bytes  # 32 bytes each, same order
    groups: list[int] = field(default_factory=list)  # KV group of each, same order; empty: all in the first group
    in_host_memory: dict[int, bytes] = field(default_factory=dict)  # names by place (shared/kv/block_hash.py)
    on_disk: dict[int, bytes] = field(default_factory=dict)  # names by place, least recently written first
    adapters: Sequence[tuple[AdapterId, str]] = ()  # with their paths; of one name the newest is last
    asleep: Sequence[str] = ()
    sleep_level: int = 0
    weights: WeightsId | None = None  # weights of the next step; None if they cannot be updated
