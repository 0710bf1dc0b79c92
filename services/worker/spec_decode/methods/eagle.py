"""eagle: a decoder layer that continues the model's own features (EAGLE, arXiv 2401.15077).

The model's output head says which token a feature means (features.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.kv.kv_memory import block_shape
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.eagle_head import EagleHead, read_eagle
from quire.services.worker.spec_decode.draft_models.features import FeatureProposer
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.shared.models.model_identity import read_config


class Eagle:
    """The weights."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder = Path(settings.model).expanduser()
        limits, self.model = target.limits, target.model
        head_config = read_eagle(read_config(folder), self.model.config)
        config = head_config.decoder
        self.place = replace(target.place, checkpoint=config.quantization)
        spec = attention_spec(config, limits.block_size, self.place, has_trees=settings.tree is not None)
        backend = choose_attention(target.attention_backend, spec)
        self.head = EagleHead(head_config, backend, self.place, limits.max_model_len)
        self.heads = (self.head,)
        target.loader.load(self.head, folder)
        self.shape = block_shape(spec, 1, self.place.dtype)
        self.block_bytes = self.shape.num_bytes

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker)

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        return self.model.whole_logits(features)
