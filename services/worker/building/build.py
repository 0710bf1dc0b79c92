"""Builds a replica from settings, ready for plans. Runs on the device thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.building import experts
from quire.services.worker.building.build_encode_worker import ENCODE, build_encode_worker
from quire.services.worker.building.build_encoder import build_encoder
from quire.services.worker.building.draft_warmup import warm_up_drafts
from quire.services.worker.building.environment import Environment, open_environment, open_ops, open_own_device
from quire.services.worker.building.kv_memory import KVMemory, allocate_kv_memory, record_steps
from quire.services.worker.building.model import LoadedModel, load_model
from quire.services.worker.building.replica_config import ReplicaConfig, read_replica_config
from quire.services.worker.building.step_execution import StepExecution, build_step_execution
from quire.services.worker.building.tiers import open_tiers
from quire.services.worker.building.vision import media_encoding, rows_layout
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv_transfer.layout import layout_of
from quire.services.worker.kv_transfer.pages import NoPages, Pages
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.loading.broadcast.weights_groups import WeightsGroups
from quire.services.worker.models.loading.loader import load_checkpoint
from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.models.loading.weight_folders import WeightFolders
from quire.services.worker.models.registry import check_config, find_encoder
from quire.services.worker.models.transformers_backend.transformers_model import TransformersCausalLM
from quire.services.worker.offload.disk_store import NO_OBSERVER, DiskObserver
from quire.services.worker.ranks.placement import SINGLE_RANK, RankPlacement
from quire.services.worker.replica.block_record import BlockRecord
from quire.services.worker.replica.block_transfers import BlockTransfers
from quire.services.worker.replica.device_orders import DeviceOrderHandler
from quire.services.worker.replica.media_encoding import NoMediaEncoding
from quire.services.worker.replica.replica import Replica, ReplicaFacts
from quire.services.worker.runner.profiling import run_trial_steps
from quire.services.worker.runner.step_cost import CostModel
from quire.services.worker.sleep.sleeper import Sleeper
from quire.services.worker.spec_decode.drafter import Drafter
from quire.services.worker.spec_decode.no_speculation import NoSpeculation
from quire.services.worker.spec_decode.open_speculation import start_speculation
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.structured.backends import backend_selection
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.port import GrammarBackend
from quire.services.worker.warmup.build_kernels import KernelCompilation
from quire.services.worker.warmup.compile_process import CompileProcess
from quire.shared.models.model_identity import read_config
from quire.shared.settings import WorkerSettings


def build_replica(
    settings: WorkerSettings,
    grammars: CompilePool | None = None,
    compiler: CompileProcess | None = None,
    placement: RankPlacement = SINGLE_RANK,
    *,
    disk_observer: DiskObserver = NO_OBSERVER,
    progress: Progress | None = None,
) -> Replica:
    """Builds this rank's part of a replica, ready for plans: loads the model, allocates KV memory, records steps and
    warms up drafts; waits for the other ranks meanwhile. `grammars`: None: no constrained output; `compiler`: an
    already started compile process; `placement`: this rank; `progress`: receives the loading progress of the weights.
    Raises QuireError for invalid settings, checkpoints or machines."""
    values = read_config(Path(settings.model))
    if settings.role == ENCODE:
        return build_encode_worker(settings, values, placement)
    encoder = find_encoder(values)
    if encoder is not None:
        return _encoder(settings, encoder, values, placement)
    replica_config = read_replica_config(settings, values, placement)
    compiling = KernelCompilation(settings, compiler) if placement.rank == 0 else None
    environment = open_environment(settings, replica_config, placement)
    loaded = load_model(settings, replica_config, environment, placement, progress)
    steps = build_step_execution(settings, replica_config, environment, loaded, grammars)
    if compiling is not None:
        compiling.wait()
    environment.place.min_over_ranks(0)  # barrier: all ranks use what the first rank has compiled
    memory = allocate_kv_memory(settings, replica_config, environment, loaded, steps)
    record_steps(replica_config, environment, loaded, steps, memory)
    if isinstance(loaded.model, TransformersCausalLM):
        run_trial_steps(steps.runner, memory.limits)
    speculation = _speculation(replica_config, steps, memory)
    parts = (settings, replica_config, environment, loaded)
    replica = _replica(*parts, steps=steps, memory=memory, speculation=speculation, disk_observer=disk_observer)
    if isinstance(speculation, Speculation) and not environment.device.is_synchronous:
        warm_up_drafts(replica, speculation)
    return replica


def _speculation(replica_config: ReplicaConfig, steps: StepExecution, memory: KVMemory) -> Speculation | NoSpeculation:
    """Starts speculation if a drafting method is configured, else returns the null object."""
    if replica_config.drafting and steps.drafter and isinstance(memory.table, DraftingSlotTable):
        return start_speculation(replica_config.drafting, steps.drafter, steps.runner, memory.table, memory.limits)
    return NoSpeculation(memory.table)


def _replica(
    settings: WorkerSettings,
    replica_config: ReplicaConfig,
    environment: Environment,
    loaded: LoadedModel,
    *,
    steps: StepExecution,
    memory: KVMemory,
    speculation: Speculation | NoSpeculation,
    disk_observer: DiskObserver,
) -> Replica:
    """Assembles the replica from its parts; opens the KV tiers below the device."""
    fitting, model, drafter = memory.limits, loaded.model, steps.drafter
    layout = _kv_layout(settings, fitting, environment.spec, loaded.samples)
    tiers = open_tiers(
        settings,
        fitting,
        memory.caches,
        loaded.shape,
        drafter,
        place=environment.place,
        layout=layout,
        observer=disk_observer,
    )
    cost_model = CostModel(replica_config.config, loaded.counts, environment.kv_dtype.itemsize)
    record = BlockRecord(fitting, memory.table)
    orders = _orders(settings, loaded, memory.caches, WeightsGroups(environment.device.torch_device, environment.rank))
    pages = _pages(settings, fitting, memory.caches, layout, drafter)
    return Replica(
        ReplicaFacts(
            fitting,
            replica_config.config.vocab_size,
            environment.device.name,
            cost_model,
            rotates_by_axes=bool(replica_config.config.rope.sections),
        ),
        steps.runner,
        record,
        speculation=speculation,
        orders=orders,
        transfers=BlockTransfers(fitting, record.contents, tiers, pages, orders),
        experts=experts.mixture_experts(settings, model, environment.place.shard),
        media=_media(settings, loaded, environment),
    )


def _media(settings: WorkerSettings, loaded: LoadedModel, environment: Environment) -> NoMediaEncoding:
    """Returns the component that encodes media."""
    layout = b"" if loaded.vision is None else rows_layout(settings, loaded.vision, loaded.samples)
    return media_encoding(loaded.vision, environment.device.torch_device, layout)


def _orders(
    settings: WorkerSettings, loaded: LoadedModel, memory: list[LayerCache], groups: WeightsGroups
) -> DeviceOrderHandler:
    """Builds the handler of orders that exchange weights or put the device's memory to sleep."""
    weights, sleep_memory = loaded.weights, loaded.sleep_memory
    folders = WeightFolders(settings.weights_folders)

    def reload_weights(model: CausalLM) -> None:
        """Loads the weights that the model had before it slept: spooled ones, those of the last update, or the
        checkpoint's."""
        if weights.id.spooled:
            load_checkpoint(model, Path(weights.id.spooled))
        elif weights.id.update:
            load_checkpoint(model, folders.find(weights.id.path))
        else:
            loaded.reload(model, Path(settings.model))

    places = sleep_memory.sleepable_memory(memory, weights)
    sleeper = Sleeper(places, lambda: weights.reload_weights(reload_weights), sleep_memory.release_cached)
    return DeviceOrderHandler(weights, folders, sleeper, groups)


def _kv_layout(settings: WorkerSettings, fitting: WorkerLimits, spec: AttentionSpec, samples: bytes) -> bytes:
    """Returns a description of the content of a block, compared between workers before they exchange KV."""
    dummy = settings.seed if settings.load_format == "dummy" else None
    return layout_of(
        Path(settings.model),
        samples,
        spec=spec,
        attention=settings.attention_backend,
        dtype=settings.dtype,
        quantization=settings.quantization,
        impl=settings.model_impl,
        layers=fitting.layout.layers_per_page,
        dummy=dummy,
    )


def _pages(
    settings: WorkerSettings, fitting: WorkerLimits, memory: list[LayerCache], layout: bytes, drafter: Drafter | None
) -> Pages | NoPages:
    """Returns pages for KV transfer, or NoPages if this worker's blocks cannot be exchanged.

    That is the case if a rank holds a part of each block, several KV groups share blocks, or drafts need KV of their
    own.
    """
    if settings.num_ranks > 1 or fitting.num_groups > 1 or fitting.layout.windows:
        return NoPages()
    if drafter is not None and drafter.block_bytes:
        return NoPages()
    return Pages(memory, layout)


def _encoder(
    settings: WorkerSettings, family: type[EncoderModel], values: dict[str, Any], placement: RankPlacement
) -> Replica:
    """Builds the replica of an encoder on this rank's device."""
    device = open_own_device(settings, placement)
    return build_encoder(settings, family, values, device, open_ops(settings, device, placement))


def open_grammars(settings: WorkerSettings) -> GrammarBackend:
    """Opens the grammar backend of the settings over the model's vocabulary and end tokens. Raises QuireError if the
    library or the tokenizer is missing. Thread-safe."""
    folder = Path(settings.model)
    config = read_config(folder)
    eos = config.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    vocab_size = check_config(config, settings.model_impl).vocab_size
    return backend_selection.open_backend(settings.structured_output_backend, folder, vocab_size, eos_ids)
