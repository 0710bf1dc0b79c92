"""Interface of a drafting method: what it allocates before memory is measured, and what it is started with
afterwards."""

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
    """The served model that is drafted for, and what a drafter needs to load its own weights."""

    model: CausalLM
    place: LayerPlacement
    limits: WorkerLimits  # requested: memory is not measured yet
    attention_backend: str  # the setting
    loader: Loader
    folder: Path  # of its checkpoint


@dataclass(frozen=True, slots=True)
class DrafterWorker:
    """Parts of the worker that a proposer shares: token history, slot table, sampler and measured limits."""

    config: SpeculativeConfig
    history: TokenHistory
    table: DraftingSlotTable
    sampler: Sampler
    limits: WorkerLimits


class Drafter(Protocol):
    """Drafting method before memory is measured: its weights, if it has some, and its needs. start() later makes its
    proposer."""

    block_bytes: int  # KV bytes per block of the model
    needs_features: bool  # reads the output head's inputs for every token of steps with drafts
    needs_prompts: bool  # reads prompts from their beginning, also in steps without drafts

    def start(self, worker: DrafterWorker) -> Proposer: ...
