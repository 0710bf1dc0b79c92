"""What a core has done in its lifetime."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.services.scheduler.core.drafts.counts import DraftCounts


@dataclass(slots=True)
class CoreCounts:
    """Totals of a core's lifetime."""

    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of these, found in the prefix cache
    resumed_tokens: int = 0  # of sequences admitted again, after a preemption or from a lost worker
    resumed_cached_tokens: int = 0  # of these, found in the prefix cache
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    compared_documents: int = 0  # that came to be compared with a query, token by token
    query_hits: int = 0  # of these, whose query was there
    stored_blocks: int = 0  # copied to host memory
    fetched_blocks: int = 0  # brought back from there
    failed_transfers: int = 0
    disk_stored_blocks: int = 0  # written to disk
    disk_fetched_blocks: int = 0  # read back into host memory
    disk_lost_blocks: int = 0  # that should have been
    disk_dropped_blocks: int = 0  # that the disk did not take
    fetches: int = 0  # from other workers
    failed_fetches: int = 0
    blocks_from_others: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
