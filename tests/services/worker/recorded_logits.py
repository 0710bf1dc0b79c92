"""Recording of logits next to sampling; all ranks gather whole rows. Rank processes import this module, so it imports
nothing that only tests need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.sampling.sampler import Sampler
from quire.shared.settings import WorkerSettings
from tests.services.worker.replica_internals import runner_of

Keep = Callable[[torch.Tensor, Any], None]  # of whole rows, and their slots


def record(sampler: Sampler, keep: Keep) -> None:
    """Records logits before each sampling, which then runs outside of CUDA graphs."""
    sample = sampler.sample

    def recording(logits: torch.Tensor, slots: Any, positions: Any) -> Any:
        keep(sampler.vocabulary.all_gather(logits), slots)
        return sample(logits, slots, positions)

    sampler.sample = recording  # type: ignore[method-assign]
    sampler.plain = lambda slots: None  # type: ignore[method-assign]


def build(build_part: Callable[..., RankReplica], settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    part = build_part(settings, placement)
    record(runner_of(part.replica).sampler, lambda logits, slots: None)
    return part
