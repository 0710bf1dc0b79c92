"""Lifetime counters of a core."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.services.scheduler.core.drafts.counts import DraftCounts


@dataclass(slots=True)
class CoreCounts:
    """Counters since the core was created."""

    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of these, found in the prefix cache
    resumed_tokens: int = 0  # of sequences admitted again, after a preemption or from a lost worker
    resumed_cached_tokens: int = 0  # of these, found in the prefix cache
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    compared_documents: int = 0  # documents scored against a query (late interaction)
    query_hits: int = 0  # of these, the query vectors were cached
    stored_blocks: int = 0  # copied to host memory
    fetched_blocks: int = 0  # copied back to the device
    failed_transfers: int = 0
    disk_stored_blocks: int = 0  # written to disk
    disk_fetched_blocks: int = 0  # read back into host memory
    disk_lost_blocks: int = 0  # blocks that could not be read back
    disk_dropped_blocks: int = 0  # blocks that the disk did not store
    fetches: int = 0  # fetches of blocks from other workers
    failed_fetches: int = 0
    blocks_from_others: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
