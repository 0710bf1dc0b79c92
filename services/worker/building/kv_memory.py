"""Allocates the KV memory and records steps over it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.worker.building.environment import Environment
from quire.services.worker.building.model import LoadedModel
from quire.services.worker.building.replica_config import ReplicaConfig
from quire.services.worker.building.step_execution import StepExecution
from quire.services.worker.kv import kv_cache, kv_memory
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models import taped
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.taped import TapedModel
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.runner.profiling import run_largest_steps
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.step.slots import SlotTable
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")


@dataclass(frozen=True, slots=True)
class KVMemory:
    """KV memory of a replica: limits with the final number of blocks, slot table and caches."""

    limits: WorkerLimits
    """Limits of the replica: the capacity that its KV blocks provide."""
    table: SlotTable
    caches: list[LayerCache]


def allocate_kv_memory(
    settings: WorkerSettings,
    replica_config: ReplicaConfig,
    environment: Environment,
    loaded: LoadedModel,
    steps: StepExecution,
) -> KVMemory:
    """Allocates the KV caches and the slot table: as many blocks as configured, or as fit into the free memory of every
    rank, measured by running the largest steps. Raises InvalidArgument if whole adapter weights do not fit."""
    _check_adapters(environment)
    if loaded.vision is not None and not environment.device.is_synchronous:
        loaded.vision.warm_up(environment.place.device)  # a first picture must not wait for kernels
    num_blocks = environment.place.min_over_ranks(
        settings.num_blocks or _measure(settings, replica_config, environment, loaded, steps)
    )
    fitting = _fitting(settings, environment.limits, num_blocks)
    drafting = replica_config.drafting
    table = DraftingSlotTable(fitting, drafting.num_speculative_tokens) if drafting else SlotTable(fitting)
    caches = kv_cache.allocate(loaded.shape, num_blocks, environment.place.device, loaded.sleep_memory.zeros)
    return KVMemory(fitting, table, caches)


def _check_adapters(environment: Environment) -> None:
    """Raises InvalidArgument if there is no memory for whole weights of adapters that may be loaded later."""
    adapters = environment.place.adapters
    reserved_bytes = 0 if adapters is None else adapters.reserved_bytes
    free = kv_memory.free_bytes(environment.place.device) if reserved_bytes else 0
    if adapters is not None and reserved_bytes > free:
        text = (
            f"lora_modules_to_save: {adapters.max_adapters} adapters (max_loras) may use {reserved_bytes:,} bytes, "
            "but only "
            f"{free:,} are free after loading the weights; lower max_loras"
        )
        raise InvalidArgument(text, field="lora_modules_to_save")


def record_steps(
    replica_config: ReplicaConfig, environment: Environment, loaded: LoadedModel, steps: StepExecution, memory: KVMemory
) -> None:
    """Prepares the runner with these blocks, records its CUDA graphs or tape over them, and logs the memory."""
    block_table = memory.table.block_table
    layout, cross_width = loaded.kv_layout, memory.table.cross_width
    caches = kv_cache.caches_by_layer(memory.caches, layout)
    steps.runner.prepare(caches, block_table, layout.num_groups, cross_width=cross_width)
    if steps.graphs is not None:
        steps.graphs.capture(steps.runner, memory.limits, block_table)
    _use_tape(steps.runner, loaded.model, environment, memory.limits, trees=replica_config.drafts_trees)
    kv_memory.report(memory.limits, loaded.shape)


def _fitting(settings: WorkerSettings, limits: WorkerLimits, num_blocks: int) -> WorkerLimits:
    """Returns the limits with `num_blocks`; shortens max_model_len, with a warning, to what they hold. Raises
    InvalidArgument if it was set explicitly, or if they hold no sequence."""
    fitting = worker_limits.fit(limits, num_blocks, explicit=bool(settings.max_model_len))
    if fitting.max_model_len < limits.max_model_len:
        log.warning(
            "max_model_len reduced to the capacity of the KV cache",
            model=limits.max_model_len,
            now=fitting.max_model_len,
        )
    return fitting


def _use_tape(
    runner: ModelRunner, model: CausalLM, environment: Environment, fitting: WorkerLimits, *, trees: bool
) -> None:
    """Makes the runner use a taped model if backend and model allow it; logs the reason on a CPU otherwise."""
    reason = taped.reject_reason(model, environment.backend, environment.place)
    if reason is None:
        runner.use_model(TapedModel(model, runner.caches, fitting, trees=trees))
    elif environment.place.device.type == "cpu":
        log.info("recorded tape is not used; kernels are launched one by one", reason=reason)


def _measure(
    settings: WorkerSettings,
    replica_config: ReplicaConfig,
    environment: Environment,
    loaded: LoadedModel,
    steps: StepExecution,
) -> int:
    """Returns the number of blocks that fit into this rank's memory, including the drafter's memory per block: on a CPU
    from the configured size, on a GPU after running the largest steps over one block and recording one graph."""
    block_bytes = loaded.shape.num_bytes + (steps.drafter.block_bytes if steps.drafter else 0)
    if settings.device == "cpu":
        return kv_memory.cpu_budget(settings.cpu_kv_cache_gib) // block_bytes
    scratch = SlotTable(environment.limits)
    memory = kv_cache.allocate(loaded.shape, 1, environment.place.device)
    caches, layout = kv_cache.caches_by_layer(memory, loaded.kv_layout), loaded.kv_layout
    steps.runner.prepare(caches, scratch.block_table, layout.num_groups, cross_width=scratch.cross_width)
    kv_memory.reset_cuda_peak_stats()
    drafts = (
        replica_config.drafting.num_speculative_tokens
        if replica_config.drafting and environment.limits.layout.has_states
        else 0
    )
    media_bytes = 0 if loaded.vision is None else loaded.vision.warm_up(environment.place.device)
    run_largest_steps(steps.runner, environment.limits, drafts)
    if steps.graphs is not None:
        steps.graphs.capture(steps.runner, environment.limits, scratch.block_table, most=1)
    total_bytes, other_bytes = kv_memory.measure_cuda_use()
    other_bytes += steps.runner.heads.query_bytes
    if environment.place.adapters is not None:
        other_bytes += environment.place.adapters.reserved_bytes
    other_bytes += media_bytes
    return max(kv_memory.cuda_budget(settings.gpu_memory_utilization, total_bytes, other_bytes) // block_bytes, 0)
