"""What a method brings along before memory is measured, and what it is started with after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.spec_decode.proposer import Proposer
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """Whom drafts are for."""

    model: CausalLM
    place: LayerPlacement
    limits: WorkerLimits  # as wished: memory is not measured yet
    attention_backend: str  # the setting
    loader: Loader
    folder: Path  # of its checkpoint


@dataclass(frozen=True, slots=True)
class DrafterWorker:
    """What drafting shares with the rest of the worker."""

    config: SpeculativeConfig
    history: TokenHistory
    table: DraftingSlotTable
    sampler: Sampler
    limits: WorkerLimits


class Drafter(Protocol):
    """Weights, where there are some."""

    block_bytes: int  # of KV, for each block of the model's
    needs_features: bool  # of every token of a step with drafts: what the model's output head gets
    needs_prompts: bool  # seen from their beginning, also by steps without drafts

    def start(self, worker: DrafterWorker) -> Proposer: ...
