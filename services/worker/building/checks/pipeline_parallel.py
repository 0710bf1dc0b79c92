"""Checks of settings that pipeline parallelism excludes."""

from __future__ import annotations

from quire.services.worker.layers.stages import FIELD
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.transformers_backend.transformers_model import TransformersCausalLM
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings


def check(settings: WorkerSettings, family: type[CausalLM], placement: RankPlacement) -> None:
    """Raises InvalidArgument for settings that exclude pipeline stages. (KV offloading rejects stages itself.)"""
    if placement.stages == 1:
        return
    contexts = f"context_parallel_size {placement.contexts} is not supported together with stages"
    few = f"it must be at least {placement.stages}, so that every stage has a sequence; got {settings.max_num_seqs}"
    reasons = {
        "speculative_config": (bool(settings.speculative_config), "drafting requires all layers in one rank group"),
        "batch_invariant": (settings.batch_invariant, "it is verified for a single process only"),
        "model_impl": (issubclass(family, TransformersCausalLM), "transformers runs all layers in one process"),
        "context_parallel_size": (placement.contexts > 1, contexts),
        "max_num_seqs": (0 < settings.max_num_seqs < placement.stages, few),
    }
    for field, (is_asked, reason) in reasons.items():
        if is_asked:
            raise InvalidArgument(f"{field}: not with {FIELD} {placement.stages}: {reason}", field=field)
