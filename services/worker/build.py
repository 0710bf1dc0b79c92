"""From settings to a replica that is ready for plans. Runs on the device's thread."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kernels
from services.worker import limits
from services.worker.attention.backends import choose_attention
from services.worker.attention.port import AttentionBackend, AttentionSpec
from services.worker.attention.spec import attention_spec
from services.worker.build_encoder import build_encoder
from services.worker.build_heads import build_heads
from services.worker.device.device import Device, choose_dtype, choose_kv_dtype, choose_quantization, open_device
from services.worker.graphs.build_graphs import GraphMaker
from services.worker.heads.heads import Heads
from services.worker.kv import kv_cache, kv_memory, state_blocks
from services.worker.kv.kv_cache import LayerCache
from services.worker.kv.kv_memory import BlockShape, block_shape
from services.worker.kv.layout import KVLayout
from services.worker.kv_transfer.layout import layout_of
from services.worker.kv_transfer.pages import Pages
from services.worker.layers.placement import Placement
from services.worker.limits import Limits
from services.worker.lora.open_adapters import open_adapters
from services.worker.models import taped
from services.worker.models.causal_lm import CausalLM
from services.worker.models.config.decoder_config import DecoderConfig
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.loading.loader import Loader, load_checkpoint
from services.worker.models.loading.weight_folders import WeightFolders
from services.worker.models.loading.weights import Weights
from services.worker.models.of_transformers.transformers_model import TransformersCausalLM
from services.worker.models.registry import check_config, find_encoder, find_model, read_model_config
from services.worker.models.taped import TapedModel
from services.worker.offload.disk_store import NOBODY, DiskObserver
from services.worker.offload.open_tiers import open_tiers
from services.worker.orders import Orders
from services.worker.ranks import staged
from services.worker.ranks.seat import ALONE, Seat
from services.worker.replica import Replica
from services.worker.runner import batch_invariance
from services.worker.runner.expert_load import ExpertLoad
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.pipeline import stage_of_steps
from services.worker.runner.profiling import run_largest_steps
from services.worker.runner.step_cost import CostModel, WeightCounts
from services.worker.sleep.open_places import SleepMemory
from services.worker.sleep.sleeper import Sleeper
from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.drafter import Drafter, Target
from services.worker.spec_decode.open_speculation import drafter_for, read_drafting, start_speculation
from services.worker.spec_decode.rehearsal import rehearse
from services.worker.spec_decode.slot_table import DraftingSlotTable
from services.worker.step.slots import SlotTable
from services.worker.structured.backends import chosen
from services.worker.structured.compile_pool import CompilePool
from services.worker.structured.port import GrammarBackend
from services.worker.warmup.build_kernels import Kernels
from services.worker.warmup.compile_process import CompileProcess
from shared.errors import InvalidArgument
from shared.logs import logger
from shared.model_identity import read_config
from shared.settings import WorkerSettings

log = logger("worker.build")


def build_replica(
    settings: WorkerSettings,
    grammars: CompilePool | None = None,
    compiler: CompileProcess | None = None,
    seat: Seat = ALONE,
    disk_observer: DiskObserver = NOBODY,
) -> Replica:
    """`grammars`: None where no output is to be constrained; `compiler`: begun already; `seat`: the rank whose part of
    the replica is built.

    Raises QuireError with what is wrong with the settings, the checkpoint or the machine.
    """
    values = read_config(folder := Path(settings.model))
    encoder = find_encoder(values)
    if encoder is not None:
        return _encoder(settings, encoder, values, seat)
    family = find_model(values, settings.model_impl)
    config = read_model_config(values, settings.model_impl)
    drafting = read_drafting(settings, config)
    wanted = limits.from_settings(settings, config.max_positions)
    wanted = replace(
        wanted,
        layout=KVLayout.of(family.kv_specs(config), wanted.max_model_len, num_stages=seat.stages),
        num_micro_batches=seat.stages,
    )
    staged.check(settings, family, seat)
    compiling = Kernels(settings, compiler) if seat.rank == 0 else None
    device = open_device(settings.device, settings.threads or num_cores(seat), seat.local_rank)
    place = _place(settings, config, device, seat, wanted)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, place.dtype, device)
    wanted = state_blocks.fit(wanted, config, kv_dtype, settings, drafting)
    if settings.batch_invariant:
        batch_invariance.check(
            settings,
            place,
            drafting,
            is_latent=config.latent is not None,
            is_recurrent=config.recurrent is not None,
        )
    spec = attention_spec(config, wanted.block_size, place, kv_dtype)
    backend = choose_attention(settings.attention_backend, spec)
    loader = Loader(settings.load_format, settings.seed)
    model = family(config, backend, place, wanted.max_model_len)
    kept = wanted.layout.of_layers(model.here)
    shape = block_shape(spec, kept.layers_per_page, kv_dtype)
    weights = _weights(model, place, seat)
    changing = Weights(model, lambda: family(config, backend, place, wanted.max_model_len), place)
    _load(model, settings, loader, place)
    sleep_memory = SleepMemory(place.device, changing, enabled=settings.enable_sleep_mode)
    target = Target(model, replace(place, adapters=None), wanted, settings.attention_backend, loader, folder)
    drafter = drafter_for(drafting, target, wanted)
    runner = _runner(model, build_heads(settings, model, wanted, place, grammars), device, place, wanted)
    graphs = _graph_maker(settings, model, backend, spec, place, drafting=drafting, drafter=drafter)
    if compiling is not None:
        compiling.wait()
    place.least(0)  # what the first rank has compiled is there for all
    block_bytes = shape.num_bytes + (drafter.block_bytes if drafter else 0)
    num_blocks = place.least(
        settings.num_blocks
        or _measure(settings, wanted, runner, graphs, shape=shape, block_bytes=block_bytes, place=place, kept=kept)
    )
    fitting = _fitting(settings, wanted, num_blocks)
    table = DraftingSlotTable(fitting, drafting.num_speculative_tokens) if drafting else SlotTable(fitting)
    memory = kv_cache.allocate(shape, num_blocks, place.device, sleep_memory.zeros)
    runner.prepare(kv_cache.of_layers(memory, kept), table.block_table, kept.num_groups)
    if graphs is not None:
        graphs.record(runner, fitting, table.block_table)
    _use_tape(runner, model, backend, place, fitting, trees=drafting is not None and drafting.tree is not None)
    kv_memory.report(fitting, shape)
    speculation = (
        start_speculation(drafting, drafter, runner, table, fitting)
        if drafting and drafter and isinstance(table, DraftingSlotTable)
        else None
    )
    layout = _kv_layout(settings, fitting, spec)
    below = open_tiers(settings, fitting, memory, shape, drafter, layout=layout, observer=disk_observer)
    replica = Replica(
        fitting,
        config.vocab_size,
        device.name,
        runner,
        table,
        speculation=speculation,
        expert_load=ExpertLoad(*model.expert_counts) if model.expert_counts else None,
        cost_model=CostModel(config, weights, kv_dtype.itemsize),
        below=below,
        pages=_pages(settings, fitting, memory, layout, drafter),
        adapters=place.adapters,
        orders=_orders(settings, changing, loader, sleep_memory, memory),
    )
    if speculation is not None and not device.is_synchronous:
        rehearse(replica, speculation)
    return replica


def _orders(
    settings: WorkerSettings, weights: Weights, loader: Loader, sleep_memory: SleepMemory, memory: list[LayerCache]
) -> Orders:
    folders = WeightFolders(settings.weights_folders)

    def read_again(model: CausalLM) -> None:
        if weights.id.spooled:
            load_checkpoint(model, Path(weights.id.spooled))
        elif weights.id.update:
            load_checkpoint(model, folders.find(weights.id.path))
        else:
            loader.load(model, Path(settings.model), model.is_elsewhere)

    places = sleep_memory.places(memory, weights)
    return Orders(weights, folders, Sleeper(places, lambda: weights.read_again(read_again), sleep_memory.let_go))


def _weights(model: CausalLM, place: Placement, seat: Seat) -> WeightCounts:
    counts = WeightCounts.of(model.destinations(), model.config, expert_ranks=place.shard.expert_ranks)
    return counts.of_all_stages(lambda value: place.stage.link.total(value) // seat.width)


def _runner(model: CausalLM, heads: Heads, device: Device, place: Placement, wanted: Limits) -> ModelRunner:
    if not device.is_synchronous:
        torch.set_num_threads(1)  # all is loaded: threads that copy would spin on, at the cost of those that fill masks
    runner = ModelRunner(model, heads, device, place.adapters)
    runner.use_stage(lambda timer: stage_of_steps(place.stage, model, place.dtype, wanted.max_num_seqs, timer))
    return runner


def _kv_layout(settings: WorkerSettings, fitting: Limits, spec: AttentionSpec) -> bytes:
    """What the bytes of a block mean."""
    dummy = settings.seed if settings.load_format == "dummy" else None
    return layout_of(
        Path(settings.model),
        spec=spec,
        attention=settings.attention_backend,
        dtype=settings.dtype,
        quantization=settings.quantization,
        impl=settings.model_impl,
        layers=fitting.layout.layers_per_page,
        dummy=dummy,
    )


def _pages(
    settings: WorkerSettings, fitting: Limits, memory: list[LayerCache], layout: bytes, drafter: Drafter | None
) -> Pages | None:
    """None where other workers can make nothing of this one's blocks: a rank has a part of them, several groups share
    them, or drafts need KV beside them."""
    if settings.num_ranks > 1 or fitting.num_groups > 1 or fitting.layout.windows:
        return None
    if drafter is not None and drafter.block_bytes:
        return None
    return Pages(memory, layout)


def _fitting(settings: WorkerSettings, wanted: Limits, num_blocks: int) -> Limits:
    fitting = limits.fit(wanted, num_blocks, explicit=bool(settings.max_model_len))
    if fitting.max_model_len < wanted.max_model_len:
        log.warning(
            "max_model_len shortened to what the KV memory holds", model=wanted.max_model_len, now=fitting.max_model_len
        )
    return fitting


def num_cores(seat: Seat) -> int:
    """For one of the ranks, which are at work at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // (seat.per_host or seat.size))


def _encoder(settings: WorkerSettings, family: type[Encoder], values: dict[str, Any], seat: Seat) -> Replica:
    device = open_device(settings.device, settings.threads or num_cores(seat), seat.local_rank)
    return build_encoder(settings, family, values, device, _ops(settings, device, seat))


def _ops(settings: WorkerSettings, device: Device, seat: Seat) -> kernels.Ops:
    ops = kernels.load(device.kind, kernels.BATCH_INVARIANT[device.kind] if settings.batch_invariant else ())
    if device.is_synchronous:
        kernels.set_num_threads(ops, settings.threads or num_cores(seat))
    log.info("kernels", device=device.name, refused=ops.refused or "none", sources=sorted(set(ops.sources.values())))
    return ops


def _place(settings: WorkerSettings, config: DecoderConfig, device: Device, seat: Seat, wanted: Limits) -> Placement:
    if settings.expert_parallel and (seat.width == 1 or config.experts is None):
        reason = "one rank has all experts" if seat.width == 1 else "this model has no experts"
        raise InvalidArgument(f"expert_parallel: {reason}", field="expert_parallel")
    dtype = choose_dtype(settings.dtype, config.dtype, device)
    ops = _ops(settings, device, seat)
    quantization = choose_quantization(settings.quantization, config.quantization, device)
    shard, stage = seat.join(device.torch_device, own_sums=settings.custom_all_reduce)
    shard = replace(shard, whole_experts=settings.expert_parallel)
    return Placement(
        ops,
        dtype,
        device.torch_device,
        quantization,
        settings.batch_invariant,
        config.quantization,
        shard,
        open_adapters(settings, ops, dtype, device, wanted),
        stage,
    )


def open_grammars(settings: WorkerSettings) -> GrammarBackend:
    """The model's vocabulary, ready for grammars. Raises QuireError where it is missing. Any thread may call it."""
    folder = Path(settings.model)
    config = read_config(folder)
    eos = config.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    vocab_size = check_config(config, settings.model_impl).vocab_size
    return chosen.open_backend(settings.structured_output_backend, folder, vocab_size, eos_ids)


def _load(model: CausalLM, settings: WorkerSettings, loader: Loader, place: Placement) -> None:
    if place.adapters is not None:
        place.adapters.check_complete()
    if isinstance(model, TransformersCausalLM):
        log.info("the model runs with the code of transformers and our attention", model_impl=settings.model_impl)
    started = time.perf_counter()
    loader.load(model, Path(settings.model), model.is_elsewhere)
    seconds, dtype = round(time.perf_counter() - started, 2), str(place.dtype)
    log.info("model loaded", model=settings.model, dtype=dtype, load_format=settings.load_format, seconds=seconds)


def _graph_maker(
    settings: WorkerSettings,
    model: CausalLM,
    backend: AttentionBackend,
    spec: AttentionSpec,
    place: Placement,
    *,
    drafting: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> GraphMaker | None:
    """None where all steps are launched kernel by kernel."""
    if spec.device == "cpu" or not settings.cuda_graphs:
        return None
    if not place.stage.is_whole:
        log.warning("no CUDA graphs: a stage of a pipeline launches its steps kernel by kernel")
        return None
    if not backend.records_decodes:
        log.warning("no CUDA graphs: the attention backend for decodes cannot be recorded")
        return None
    chunks = settings.cuda_graph_chunks and backend.records_chunks and state_blocks.records_chunks(model.config, place)
    if chunks != settings.cuda_graph_chunks:
        log.info("no CUDA graphs for chunks: what computes them cannot be recorded")
    tile = backend.rows_per_prefix_tile(spec)
    samples_per_row = 1 + (drafting.num_speculative_tokens if drafting else 0)
    keeps_hidden = drafter is not None and drafter.needs_features
    return GraphMaker(model, tile, place, chunks=chunks, samples_per_row=samples_per_row, keeps_hidden=keeps_hidden)


def _use_tape(
    runner: ModelRunner, model: CausalLM, backend: AttentionBackend, place: Placement, fitting: Limits, *, trees: bool
) -> None:
    reason = taped.reject_reason(model, backend, place)
    if reason is None:
        runner.use_model(TapedModel(model, runner.caches, fitting, trees=trees))
    elif place.device.type == "cpu":
        log.info("no tape: steps are launched kernel by kernel", reason=reason)


def _measure(
    settings: WorkerSettings,
    wanted: Limits,
    runner: ModelRunner,
    graphs: GraphMaker | None,
    *,
    shape: BlockShape,
    block_bytes: int,
    place: Placement,
    kept: KVLayout,
) -> int:
    """Blocks that the free memory gives; each costs `block_bytes` in all."""
    if settings.device == "cpu":
        return kv_memory.cpu_budget(settings.cpu_kv_cache_gib) // block_bytes
    scratch = SlotTable(wanted)
    memory = kv_cache.allocate(shape, 1, place.device)
    runner.prepare(kv_cache.of_layers(memory, kept), scratch.block_table, kept.num_groups)
    kv_memory.forget_cuda_peak()
    run_largest_steps(runner, wanted)
    if graphs is not None:
        graphs.record(runner, wanted, scratch.block_table, most=1)
    total_bytes, other_bytes = kv_memory.measure_cuda_use()
    return max(kv_memory.cuda_budget(settings.gpu_memory_utilization, total_bytes, other_bytes) // block_bytes, 0)
