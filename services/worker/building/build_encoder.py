"""Builds a replica of an encoder from settings: no KV memory, no sampling, whole prompts. Runs on the device thread."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.kernels import Ops
from quire.services.worker.building.vision import RowShape, media_encoding, open_vision
from quire.services.worker.device.device import Device, choose_dtype
from quire.services.worker.heads.encoder_pooling import EncoderPoolingHead, SamplingRefusal
from quire.services.worker.heads.heads import Heads
from quire.services.worker.heads.late_interaction import LateInteractionScorer
from quire.services.worker.heads.sentence_head import SentenceHead
from quire.services.worker.kv_transfer.pages import NoPages
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.media.step_media import StepMedia
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import EncoderConfig
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.registry import read_encoder_config
from quire.services.worker.offload.tiers import Tiers
from quire.services.worker.replica.block_record import BlockRecord
from quire.services.worker.replica.block_transfers import BlockTransfers
from quire.services.worker.replica.device_orders import NoDeviceOrders
from quire.services.worker.replica.mixture_experts import MixtureExperts
from quire.services.worker.replica.replica import Replica, ReplicaFacts
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.spec_decode.no_speculation import NoSpeculation
from quire.services.worker.step.slots import SlotTable
from quire.services.worker.step.text_marks import TextMarks
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import NOTHING, KVGroup
from quire.shared.logs import logger
from quire.shared.models.sentence_transformers import SentenceModel, read_sentence_model
from quire.shared.settings import WorkerSettings

log = logger("worker.build")

NUM_BLOCKS = 2  # the null block and one more, the minimum schedulers accept; neither is used


def build_encoder(
    settings: WorkerSettings, family: type[EncoderModel], values: dict[str, Any], device: Device, ops: Ops
) -> Replica:
    """Builds the replica of an encoder: loads the weights and prepares a runner without KV memory, tiers or
    speculation. `values`: config.json. Raises QuireError for invalid settings or checkpoints."""
    _refuse(settings)
    config, folder = read_encoder_config(values), Path(settings.model)
    fitting = encoder_limits(settings, config)
    place = LayerPlacement(ops, choose_dtype(settings.dtype, config.dtype, device), device.torch_device)
    model = family(config, place, config.max_positions)
    started = time.perf_counter()
    loader = Loader(settings.load_format, settings.seed)
    loader.load(model, folder)
    rows = RowShape(config.output_size)
    vision = open_vision(settings, place, loader, rows, fitting.max_num_batched_tokens)
    log.info("model loaded", model=settings.model, dtype=str(place.dtype), seconds=_since(started))
    marks = TextMarks(config.num_token_types)
    runner = ModelRunner(model, _heads(settings, model, fitting, place, marks), device, marks=marks)
    if vision is not None:
        vision = replace(vision, sees_ahead=False)  # a prompt is computed in one step anyway
        runner.use_media(StepMedia(vision.cache, device.torch_device))
        if not device.is_synchronous:
            vision.warm_up(device.torch_device)  # a first picture must not wait for kernels
    table = SlotTable(fitting)
    runner.prepare([], table.block_table)
    log.info(
        "the model is an encoder: no KV cache, every prompt is computed in one step",
        tokens_per_step=fitting.max_num_batched_tokens,
    )
    record, orders = BlockRecord(fitting, table), NoDeviceOrders()
    return Replica(
        ReplicaFacts(fitting, config.vocab_size, device.name),
        runner,
        record,
        speculation=NoSpeculation(table),
        orders=orders,
        transfers=BlockTransfers(fitting, record.contents, Tiers(), NoPages(), orders),
        experts=MixtureExperts(),
        media=media_encoding(vision, device.torch_device),
    )


def encoder_limits(settings: WorkerSettings, config: EncoderConfig) -> WorkerLimits:
    """Returns limits with room for the longest prompt in a step, and blocks that hold nothing. A folder of
    sentence-transformers may limit prompts to less than the model's positions, unless max_model_len is set. Raises
    InvalidArgument if max_num_batched_tokens is set below that."""
    sentence = read_sentence_model(Path(settings.model))
    longest = min(config.max_positions, sentence.max_seq_length if sentence and sentence.max_seq_length else 1 << 30)
    if settings.max_model_len:
        longest = config.max_positions  # explicit: up to the model's positions
    limits = worker_limits.from_settings(settings, longest)
    layout = KVLayout((KVGroup(NOTHING, tuple(range(config.num_layers))),))
    limits = replace(limits, layout=layout, num_blocks=NUM_BLOCKS)
    if limits.max_num_batched_tokens >= limits.max_model_len:
        return limits
    if settings.max_num_batched_tokens:
        text = (
            f"max_num_batched_tokens: {limits.max_num_batched_tokens} is less than max_model_len, "
            f"{limits.max_model_len}: an encoder computes a prompt in one step"
        )
        raise InvalidArgument(text, field="max_num_batched_tokens")
    return replace(limits, max_num_batched_tokens=limits.max_model_len)


def _refuse(settings: WorkerSettings) -> None:
    """Raises InvalidArgument, naming the first of them, for settings that are meaningless or unsupported for
    encoders."""
    asked = {
        "speculative_config": bool(settings.speculative_config),
        "lora": bool(settings.lora),
        "lora_folders": bool(settings.lora_folders),
        "kv_offloading_size": settings.kv_offloading_size > 0,
        "kv_offloading_disk": bool(settings.kv_offloading_disk),
        "kv_offloading_region": bool(settings.kv_offloading_region),
        "tensor_parallel_size": settings.tensor_parallel_size > 1,
        "pipeline_parallel_size": settings.pipeline_parallel_size > 1,
        "context_parallel_size": settings.context_parallel_size > 1,
        "batch_invariant": settings.batch_invariant,
        "quantization": settings.quantization != "none",
        "model_impl": settings.model_impl == "transformers",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(f"{name}: does not apply to an encoder; leave it out", field=name)


def _heads(
    settings: WorkerSettings, model: EncoderModel, fitting: WorkerLimits, place: LayerPlacement, marks: TextMarks
) -> Heads:
    """Builds the heads. The sampler is never used: schedulers and SamplingRefusal reject sampling requests."""
    sampler = Sampler(fitting.max_num_seqs, model.config.vocab_size, settings.max_logprobs, place.ops, place.device)
    load = settings.load_format != "dummy"
    plain, size = SentenceModel((model.pooling,), normalizes=True), model.config.output_size
    default = SentenceHead.from_folder(Path(settings.model), plain, place.device, load=load)
    late = LateInteractionScorer.from_settings(settings, default.size(size)) if default.compares else None
    pooling = EncoderPoolingHead(size, default, model.classifier, late)
    return Heads(sampler, [pooling], [SamplingRefusal(), marks], late)


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)
