"""Builds the replica of an encode worker: a model's encoder of media, without language weights and KV memory. Runs on
the device thread."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.services.worker.building.build_encoder import NUM_BLOCKS
from quire.services.worker.building.environment import open_ops, open_own_device
from quire.services.worker.building.replica_config import read_replica_config
from quire.services.worker.building.vision import RowShape, media_encoding, open_vision, rows_layout, vision_size
from quire.services.worker.device.device import choose_dtype
from quire.services.worker.host.weight_folders import WeightFolders
from quire.services.worker.kv_transfer.pages import NoPages
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.loading import weight_samples
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.registry import find_encoder
from quire.services.worker.offload.tiers import Tiers
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.replica.block_record import BlockRecord
from quire.services.worker.replica.block_transfers import BlockTransfers
from quire.services.worker.replica.encoder_orders import EncoderOrders
from quire.services.worker.replica.mixture_experts import MixtureExperts
from quire.services.worker.replica.replica import Replica, ReplicaFacts
from quire.services.worker.runner.no_steps import NoSteps
from quire.services.worker.spec_decode.no_speculation import NoSpeculation
from quire.services.worker.step.slots import SlotTable
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.kv.kv_specs import NOTHING, KVGroup
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")

ENCODE = "encode"  # WorkerSettings.role
MIB = 1 << 20


def build_encode_worker(settings: WorkerSettings, values: dict[str, Any], placement: RankPlacement) -> Replica:
    """Builds the replica: loads the encoder alone, and prepares nothing for steps. `values`: config.json. Raises
    InvalidArgument for models without an encoder and for several ranks, FailedPrecondition for weights that cannot be
    identified."""
    if find_encoder(values) is not None:
        text = "the model is an encoder, whose workers encode pictures themselves; leave it out"
        raise InvalidArgument(f"role: {text}", field="role")
    if settings.num_ranks > 1:
        text = "an encode worker is one process; start more of them (--encode-workers) instead of ranks"
        raise InvalidArgument(f"role: {text}", field="role")
    config = read_replica_config(settings, values, placement)
    device = open_own_device(settings, placement)
    ops, dtype = open_ops(settings, device, placement), choose_dtype(settings.dtype, config.config.dtype, device)
    place = LayerPlacement(ops, dtype, device.torch_device, batch_invariant=settings.batch_invariant)
    started, loader = time.perf_counter(), Loader(settings.load_format, settings.seed)
    rows = RowShape.of_decoder(config.family, config.config)
    vision = open_vision(settings, place, loader, rows, config.limits.max_num_batched_tokens)
    if vision is None:
        text = "encode needs a model with an encoder of pictures, its processor's files, and no language_model_only"
        raise InvalidArgument(f"role: {text}", field="role")
    samples = weight_samples.folder_digest(Path(settings.model)) if loader.reads_files else b""
    layout = rows_layout(settings, vision, samples)
    if not layout:
        raise FailedPrecondition(
            f"model: the weights in {settings.model} cannot be read, to compare them with other workers'; check them",
            field="model",
        )
    if not device.is_synchronous:
        vision.warm_up(device.torch_device)  # a first picture must not wait for kernels
    on_meta = replace(place, device=torch.device("meta"))
    size = vision_size(settings, on_meta, config.config.hidden_size, config.limits.max_num_batched_tokens)
    log.info(
        "encode worker: no language weights, no KV cache",
        weights_mib=size.weight_bytes // MIB,
        rows_mib=size.cache_bytes // MIB,
        seconds=round(time.perf_counter() - started, 2),
    )
    limits, folder = _limits(config.limits), Path(settings.model)
    orders = EncoderOrders(vision.encoder, vision.new, WeightFolders(settings.weights_folders), folder)
    table = SlotTable(limits)
    record = BlockRecord(limits, table)
    return Replica(
        ReplicaFacts(limits, config.config.vocab_size, device.name),
        NoSteps(),
        record,
        speculation=NoSpeculation(table),
        orders=orders,
        transfers=BlockTransfers(limits, record.contents, Tiers(), NoPages(), orders),
        experts=MixtureExperts(),
        media=media_encoding(vision, device.torch_device, layout),
    )


def _limits(limits: WorkerLimits) -> WorkerLimits:
    """Returns limits with one slot and blocks that hold nothing: no plan uses them."""
    layout = KVLayout((KVGroup(NOTHING, (0,)),))
    return replace(limits, layout=layout, num_blocks=NUM_BLOCKS, max_num_seqs=1, num_micro_batches=1)
