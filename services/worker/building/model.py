"""Loads the model and determines the layout of its KV blocks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quire.services.worker.building.encoder_decoder import EncoderDecoderModel, open_encoder
from quire.services.worker.building.environment import Environment
from quire.services.worker.building.replica_config import ReplicaConfig
from quire.services.worker.building.vision import RowShape, Vision, open_vision
from quire.services.worker.kv.kv_memory import BlockShape, block_shape
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.loading import weight_samples
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.models.loading.weights import Weights
from quire.services.worker.models.transformers_backend.transformers_model import TransformersCausalLM
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.runner.step_cost import WeightCounts
from quire.services.worker.sleep.sleep_memory import SleepMemory
from quire.shared.errors import FailedPrecondition
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model with its loader, KV layout, weights, and what reloading them needs."""

    model: CausalLM
    loader: Loader
    kv_layout: KVLayout
    """KV layout of the layers on this rank."""
    shape: BlockShape
    counts: WeightCounts
    weights: Weights
    """Weights that can be updated while the worker runs."""
    sleep_memory: SleepMemory
    samples: bytes
    """Samples of the folder's weight files, taken at load."""
    vision: Vision | None = None
    """Encoder of media; None: the worker encodes none."""

    def reload(self, model: CausalLM, folder: Path) -> None:
        """Loads the weights from `folder` into `model` again. Raises FailedPrecondition if the files are not those that
        were loaded first."""
        if self.loader.reads_files and weight_samples.folder_digest(folder) != self.samples:
            text = f"model: the weights in {folder} have changed since they were loaded; restart this worker"
            raise FailedPrecondition(text, field="model")
        self.loader.load(model, folder, model.is_on_other_stage)


def load_model(
    settings: WorkerSettings,
    replica_config: ReplicaConfig,
    environment: Environment,
    placement: RankPlacement,
    progress: Progress | None = None,
) -> LoadedModel:
    """Builds the model's layers and loads the weights, hashing samples of the files meanwhile; `progress` receives the
    loading progress. Raises QuireError for invalid checkpoints and adapters that no layer fits."""
    place = environment.place
    loader = Loader(settings.load_format, settings.seed, progress or Progress())

    def new() -> CausalLM:
        """Builds the layers of this rank without loading weights."""
        return replica_config.family(
            replica_config.config, environment.backend, place, environment.limits.max_model_len
        )

    model = new()
    kept = environment.limits.layout.for_layers(model.here)
    shape = block_shape(environment.spec, kept.layers_per_page, environment.kv_dtype)
    counts = _count(model, place, placement)
    weights = Weights(model, new, place)
    with ThreadPoolExecutor(1, thread_name_prefix="samples") as beside:
        sampling = beside.submit(weight_samples.folder_digest, Path(settings.model)) if loader.reads_files else None
        _load(model, settings, loader, place)
        limits, rows = environment.limits, RowShape.of_decoder(replica_config.family, replica_config.config)
        if isinstance(model, EncoderDecoderModel):
            vision: Vision | None = open_encoder(settings, place, loader, model, limits)
        else:
            vision = open_vision(settings, place, loader, rows, limits.max_num_batched_tokens)
        if vision is not None:
            weights.use_encoder(vision.encoder, vision.new)
        samples = sampling.result() if sampling is not None else b""
    sleep_memory = SleepMemory(place.device, weights, enabled=settings.enable_sleep_mode)
    return LoadedModel(model, loader, kept, shape, counts, weights, sleep_memory, samples, vision)


def _count(model: CausalLM, place: LayerPlacement, placement: RankPlacement) -> WeightCounts:
    """Counts the model's weights; with pipeline stages sums over all of them, which blocks until every rank calls
    it."""
    counts = WeightCounts.of(model.destinations(), model.config, expert_ranks=place.shard.expert_ranks)
    if place.stage.is_whole:
        return counts
    return counts.of_all_stages(lambda value: place.stage.link.sum_over_ranks(value) // placement.width)


def _load(model: CausalLM, settings: WorkerSettings, loader: Loader, place: LayerPlacement) -> None:
    """Loads the weights after checking that every adapter has its layers; logs the time it took."""
    if place.adapters is not None:
        place.adapters.check_complete()
    if isinstance(model, TransformersCausalLM):
        log.info("the model runs with the code of transformers and Quire's attention", model_impl=settings.model_impl)
    started = time.perf_counter()
    loader.load(model, Path(settings.model), model.is_on_other_stage)
    seconds, dtype = round(time.perf_counter() - started, 2), str(place.dtype)
    log.info("model loaded", model=settings.model, dtype=dtype, load_format=settings.load_format, seconds=seconds)
