"""Environment a model runs in: device, kernels, this rank's part, attention backend."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from quire import kernels
from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.attention.context_parallel import ContextParallelAttention
from quire.services.worker.attention.port import AttentionBackend, AttentionSpec
from quire.services.worker.building import experts
from quire.services.worker.building.checks import batch_invariance, state_blocks
from quire.services.worker.building.replica_config import ReplicaConfig
from quire.services.worker.device.device import Device, choose_dtype, choose_kv_dtype, choose_quantization, open_device
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.lora.open_adapters import open_adapters
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.vision.registry import pictures_see_ahead
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")


@dataclass(frozen=True, slots=True)
class Environment:
    """Device, placement, KV type and attention backend of this rank."""

    device: Device
    place: LayerPlacement
    kv_dtype: torch.dtype
    limits: WorkerLimits
    """Configured limits, with blocks that are large enough for the model's recurrent states."""
    spec: AttentionSpec
    backend: AttentionBackend
    rank: int


def open_environment(settings: WorkerSettings, replica_config: ReplicaConfig, placement: RankPlacement) -> Environment:
    """Opens the device, loads kernels and adapters, joins the ranks' collectives, and chooses types and attention
    backend. Raises QuireError for what the device or the machine does not support."""
    config = replica_config.config
    device = open_own_device(settings, placement)
    place = _place(settings, replica_config, device, placement)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, place.dtype, device)
    fitted = state_blocks.fit(replica_config.limits, config, kv_dtype, settings, shard=place.shard)
    if settings.batch_invariant:
        batch_invariance.check(
            settings,
            place,
            replica_config.drafting,
            is_latent=config.latent is not None,
            is_recurrent=config.recurrent is not None,
        )
    spec = attention_spec(
        config,
        fitted.block_size,
        place,
        kv_dtype,
        has_trees=replica_config.drafts_trees,
        sees_ahead=pictures_see_ahead(settings),
    )
    return Environment(device, place, kv_dtype, fitted, spec, _attention(settings, spec, place), placement.rank)


def _attention(settings: WorkerSettings, spec: AttentionSpec, place: LayerPlacement) -> AttentionBackend:
    """Chooses the attention backend, wrapped for context parallelism if several ranks share a sequence."""
    backend = choose_attention(settings.attention_backend, spec)
    return backend if place.context.is_whole else ContextParallelAttention(backend)


def open_own_device(settings: WorkerSettings, placement: RankPlacement) -> Device:
    """Opens this rank's device with its share of the host's cores. Raises QuireError if it is not there."""
    return open_device(settings.device, settings.threads or num_cores(placement), placement.local_rank)


def num_cores(placement: RankPlacement) -> int:
    """Returns the number of CPU cores for one of the ranks of this host, at least 1; the ranks run concurrently."""
    return max(1, len(os.sched_getaffinity(0)) // (placement.per_host or placement.size))


def open_ops(settings: WorkerSettings, device: Device, placement: RankPlacement) -> kernels.Ops:
    """Loads the kernels for the device, only batch-invariant packages if that is set, sets their threads on a CPU, and
    logs their sources."""
    ops = kernels.load(device.kind, kernels.BATCH_INVARIANT[device.kind] if settings.batch_invariant else ())
    if device.is_synchronous:
        kernels.set_num_threads(ops, settings.threads or num_cores(placement))
    log.info("kernels", device=device.name, refused=ops.refused or "none", sources=sorted(set(ops.sources.values())))
    return ops


def _place(
    settings: WorkerSettings, replica_config: ReplicaConfig, device: Device, placement: RankPlacement
) -> LayerPlacement:
    """Builds the placement of layers: kernels, types, quantization, adapters, and this rank's part. Joins the ranks'
    collectives, which blocks until all ranks do."""
    num_copies = experts.num_copies(settings, replica_config.config, placement)
    dtype = choose_dtype(settings.dtype, replica_config.config.dtype, device)
    ops = open_ops(settings, device, placement)
    stored = replica_config.config.quantization
    quantization = choose_quantization(settings.quantization, "" if stored is None else stored.method, device)
    own, overlaps = settings.use_custom_all_reduce, settings.use_overlapped_all_reduce
    shard, stage, context = placement.join(device.torch_device, use_custom_all_reduce=own, overlaps=overlaps)
    shard = replace(
        shard,
        whole_experts=settings.expert_parallel,
        spare_experts=num_copies // placement.width,
        dispatches=settings.all2all_backend == "alltoall",
    )
    return LayerPlacement(
        ops,
        dtype,
        device.torch_device,
        quantization,
        settings.batch_invariant,
        stored,
        shard,
        open_adapters(settings, ops, dtype, device, replica_config.limits),
        stage,
        context,
    )
