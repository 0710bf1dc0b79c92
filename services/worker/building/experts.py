"""Distribution of a mixture's experts over ranks."""

from __future__ import annotations

from quire.services.worker.layers.sharding import Shard
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.mixture import MixtureForCausalLM
from quire.services.worker.ranks.expert_balance import ExpertBalance
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.replica.mixture_experts import BalancedExperts, MixtureExperts
from quire.services.worker.runner.expert_load import ExpertLoad
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings


def num_copies(settings: WorkerSettings, config: DecoderConfig, placement: RankPlacement) -> int:
    """Returns the number of replicas of a layer's busy experts, over all ranks (num_redundant_experts). Raises
    InvalidArgument for combinations of expert settings that cannot be distributed."""
    if settings.expert_parallel and (placement.width == 1 or config.experts is None):
        reason = "it requires more than one rank" if placement.width == 1 else "the model has no experts"
        raise InvalidArgument(f"expert_parallel: {reason}", field="expert_parallel")
    if settings.all2all_backend != "allreduce":
        _check_dispatch(settings)
    if settings.enable_eplb:
        _check_moving(settings)
    elif settings.num_redundant_experts:
        reason = "it requires enable_eplb, which places replicas by load"
        raise InvalidArgument(f"num_redundant_experts: {reason}", field="num_redundant_experts")
    if settings.num_redundant_experts % placement.width:
        reason = f"{settings.num_redundant_experts} is not divisible by the {placement.width} ranks"
        raise InvalidArgument(f"num_redundant_experts: {reason}", field="num_redundant_experts")
    return settings.num_redundant_experts


def _check_dispatch(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for settings that exclude all2all_backend other than allreduce."""
    reason = (
        "it requires expert_parallel"
        if not settings.expert_parallel
        else "LoRA adapters are not supported with it"
        if settings.lora or settings.lora_folders
        else "batch_invariant is not supported with it"
        if settings.batch_invariant
        else ""
    )
    if reason:
        chosen = settings.all2all_backend
        raise InvalidArgument(f"all2all_backend: {chosen}: {reason}", field="all2all_backend")


def _check_moving(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for settings that exclude moving experts between ranks (enable_eplb)."""
    reason = (
        "it requires expert_parallel"
        if not settings.expert_parallel
        else "LoRA adapters are not supported with it"
        if settings.lora or settings.lora_folders
        else "batch_invariant is not supported with it"
        if settings.batch_invariant
        else ""
    )
    if reason:
        raise InvalidArgument(f"enable_eplb: {reason}", field="enable_eplb")


def mixture_experts(settings: WorkerSettings, model: CausalLM, shard: Shard) -> MixtureExperts:
    """Returns the object that reads a model's expert load and, with enable_eplb, moves experts between ranks; an empty
    one for models without experts."""
    if model.expert_counts is None:
        return MixtureExperts()
    load = ExpertLoad(*model.expert_counts)
    if not settings.enable_eplb or not isinstance(model, MixtureForCausalLM):
        return MixtureExperts(load.read)
    interval = settings.eplb_step_interval
    return BalancedExperts(load.read, ExpertBalance(model.sparse_layers, model.expert_counts[0], shard, interval))
