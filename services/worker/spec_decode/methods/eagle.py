"""eagle: drafts with a decoder layer that continues the model's own features (EAGLE, arXiv 2401.15077).

The model's output head maps the features to tokens (feature_proposer.py).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.eagle_head import EagleHead, read_eagle
from quire.services.worker.spec_decode.draft_models.feature_proposer import FeatureProposer
from quire.services.worker.spec_decode.draft_models.head_placement import place_head
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.shared.models.model_identity import read_config


class Eagle:
    """Weights of an EAGLE head, loaded when constructed. Raises InvalidArgument if it does not fit the model."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder, self.model = Path(settings.model).expanduser(), target.model
        config = read_eagle(read_config(folder), self.model.config)
        site = place_head(config.decoder, settings, target)
        self.place, self.shape, self.block_bytes = site.place, site.shape, site.shape.num_bytes
        self.head = EagleHead(config, site.backend, site.place, target.limits.max_model_len)
        self.heads = (self.head,)
        target.loader.load(self.head, folder)

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker)

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        return self.model.whole_logits(features)
