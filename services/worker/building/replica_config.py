"""Replica configuration from settings and the checkpoint's config.json, before any device is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.services.worker.building.checks import encoder_decoder, pipeline_parallel
from quire.services.worker.building.vision import with_room_for_pictures
from quire.services.worker.limits import worker_limits
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.attention_spec import block_size_for
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.loading.output_heads import resolve_output_head
from quire.services.worker.models.registry import find_model, read_model_config
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.spec_decode.config import SpeculativeConfig, tree_of
from quire.services.worker.spec_decode.open_speculation import read_speculative_config
from quire.shared.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Model family, model configuration, speculation and limits of a replica."""

    family: type[CausalLM]
    config: DecoderConfig
    drafting: SpeculativeConfig | None
    limits: WorkerLimits

    @property
    def drafts_trees(self) -> bool:
        return tree_of(self.drafting) is not None


def read_replica_config(settings: WorkerSettings, values: dict[str, Any], placement: RankPlacement) -> ReplicaConfig:
    """Reads the configuration and checks what needs no device; `values` is config.json. Compares output head and
    embeddings in the checkpoint, if config.json ties them. Raises QuireError for unsupported models and settings."""
    family = find_model(values, settings.model_impl)
    config = read_model_config(values, settings.model_impl)
    if Loader(settings.load_format, settings.seed).reads_files:
        config = resolve_output_head(config, Path(settings.model))
    drafting = read_speculative_config(settings, config)
    block_size = block_size_for(settings, config, has_trees=tree_of(drafting) is not None)
    asked = worker_limits.from_settings(settings, config.max_positions, block_size)
    asked = with_room_for_pictures(settings, asked)
    asked = replace(
        asked,
        layout=KVLayout.of(family.kv_specs(config), asked.max_model_len, num_stages=placement.stages),
        num_micro_batches=placement.stages,
    )
    pipeline_parallel.check(settings, family, placement)
    if asked.layout.cross_length:
        encoder_decoder.check(settings)
    return ReplicaConfig(family, config, drafting, asked)
