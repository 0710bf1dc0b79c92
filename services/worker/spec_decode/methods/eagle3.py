"""eagle3: drafts with a decoder layer that reads the inputs of three of the model's layers (EAGLE-3, arXiv
2503.01840).

It processes features as `eagle` does, but has features and an output head of its own, over a smaller vocabulary.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.eagle3_head import Eagle3Head, read_eagle3
from quire.services.worker.spec_decode.draft_models.feature_proposer import FeatureProposer
from quire.services.worker.spec_decode.draft_models.head_placement import place_head
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.shared.models.model_identity import read_config


class Eagle3:
    """Weights of an EAGLE-3 head, loaded when constructed; makes the model keep the states of the layers that it
    reads."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder, self.model = Path(settings.model).expanduser(), target.model
        config = read_eagle3(read_config(folder), self.model.config)
        site = place_head(config.decoder, settings, target)
        self.place, self.shape, self.block_bytes = site.place, site.shape, site.shape.num_bytes
        names, num_positions = target.loader.names(folder), target.limits.max_model_len
        self._size = config.decoder.hidden_size
        self.head = Eagle3Head(
            config, self.model.config, names, site.backend, place=site.place, num_positions=num_positions
        )
        self.heads = (self.head,)
        target.loader.load(self.head, folder)
        self.model.keep_states(config.layers)

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker, size=self._size, project=self.head.project_states)

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        return self.head.logits(features)
