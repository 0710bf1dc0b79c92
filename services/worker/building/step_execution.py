"""Execution of steps: the runner with its heads, the drafter, and the builder of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.services.worker.building.build_heads import build_heads
from quire.services.worker.building.checks import state_blocks
from quire.services.worker.building.encoder_decoder import EncoderDecoderModel
from quire.services.worker.building.environment import Environment
from quire.services.worker.building.graph_maker import GraphBuilder
from quire.services.worker.building.model import LoadedModel
from quire.services.worker.building.replica_config import ReplicaConfig
from quire.services.worker.heads.heads import Heads
from quire.services.worker.lora.no_adapters import NO_ADAPTERS
from quire.services.worker.media.step_media import StepMedia
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.runner.component import AdapterRows
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.runner.pipeline import RunnerStage
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.drafter import Drafter, DraftTarget
from quire.services.worker.spec_decode.open_speculation import create_drafter
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")


@dataclass(frozen=True, slots=True)
class StepExecution:
    """Runner, drafter and graph builder of a replica."""

    runner: ModelRunner
    drafter: Drafter | None
    graphs: GraphBuilder | None


def build_step_execution(
    settings: WorkerSettings,
    replica_config: ReplicaConfig,
    environment: Environment,
    loaded: LoadedModel,
    grammars: CompilePool | None,
) -> StepExecution:
    """Builds heads and runner, creates the drafter, which loads its weights, and prepares the recording of CUDA graphs.
    Drafters get no adapters."""
    model, place, limits = loaded.model, environment.place, environment.limits
    without = replace(place, adapters=None)
    target = DraftTarget(model, without, limits, settings.attention_backend, loaded.loader, Path(settings.model))
    drafter = create_drafter(replica_config.drafting, target, limits)
    runner = _runner(model, build_heads(settings, model, limits, place, grammars), environment)
    if loaded.vision is not None and isinstance(model, EncoderDecoderModel):
        runner.use_cross_attention(loaded.vision.cache, model)
    elif loaded.vision is not None:
        device, sees_ahead = environment.device.torch_device, environment.spec.sees_ahead
        runner.use_media(
            StepMedia(loaded.vision.cache, device, sees_ahead=sees_ahead, sees_items=loaded.vision.sees_items)
        )
    return StepExecution(
        runner, drafter, _graph_maker(settings, model, environment, drafting=replica_config.drafting, drafter=drafter)
    )


def _runner(model: CausalLM, heads: Heads, environment: Environment) -> ModelRunner:
    """Builds the runner and adds adapters, context parallelism and its pipeline stage as configured; on a GPU limits
    torch to one CPU thread."""
    if not environment.device.is_synchronous:
        torch.set_num_threads(
            1
        )  # after loading: idle copy threads would spin, at the cost of those that fill grammar masks
    place = environment.place
    runner = ModelRunner(model, heads, environment.device, place.adapters or NO_ADAPTERS)
    if place.adapters is not None:
        runner.add_component(AdapterRows(place.adapters))
    if not place.context.is_whole:
        runner.use_context(place.context)
    if not place.stage.is_whole:
        num_slots = environment.limits.max_num_seqs
        runner.use_stage(
            lambda timer, staging: RunnerStage(model, place.dtype, num_slots, timer=timer, staging=staging)
        )
    return runner


def _graph_maker(
    settings: WorkerSettings,
    model: CausalLM,
    environment: Environment,
    *,
    drafting: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> GraphBuilder | None:
    """Returns the builder of CUDA graphs; None if all steps are launched kernel by kernel: on a CPU, if cuda_graphs is
    off, or, with a warning, if the attention backend cannot be recorded."""
    backend, spec, place = environment.backend, environment.spec, environment.place
    if spec.device == "cpu" or not settings.cuda_graphs:
        return None
    if not backend.records_decodes:
        log.warning("CUDA graphs are not used: the attention backend for decodes cannot be recorded")
        return None
    chunks = settings.cuda_graph_chunks and backend.records_chunks and state_blocks.records_chunks(model.config, place)
    chunks = chunks and not environment.limits.layout.cross_length  # each token of a chunk would be a row
    if chunks != settings.cuda_graph_chunks:
        log.info("CUDA graphs are not used for prompt chunks: their kernels cannot be recorded")
    tile = backend.rows_per_prefix_tile(spec)
    has_states = model.config.recurrent is not None  # steps with drafts are then not recorded
    samples_per_row = 1 + (drafting.num_speculative_tokens if drafting and not has_states else 0)
    keeps_hidden = drafter is not None and drafter.needs_features
    return GraphBuilder(
        model,
        tile,
        place,
        chunks=chunks,
        samples_per_row=samples_per_row,
        keeps_hidden=keeps_hidden,
        has_trees=spec.has_trees,
    )
