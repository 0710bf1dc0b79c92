"""eagle3: a decoder layer that reads what three of the model's layers read (EAGLE-3, arXiv 2503.01840).

It sees and drafts as `eagle` does; its features are its own, and it has an output head of its own, over a vocabulary of
fewer tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.kv.kv_memory import block_shape
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.eagle3_head import Eagle3Head, read_eagle3
from quire.services.worker.spec_decode.draft_models.features import FeatureProposer
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.shared.models.model_identity import read_config


class Eagle3:
    """The weights."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder = Path(settings.model).expanduser()
        limits, self.model = target.limits, target.model
        head_config = read_eagle3(read_config(folder), self.model.config)
        config = head_config.decoder
        self.place = replace(target.place, checkpoint=config.quantization)
        spec = attention_spec(config, limits.block_size, self.place, has_trees=settings.tree is not None)
        backend = choose_attention(target.attention_backend, spec)
        self._size = config.hidden_size
        names = target.loader.names(folder)
        self.head = Eagle3Head(
            head_config, self.model.config, names, backend, place=self.place, num_positions=limits.max_model_len
        )
        self.heads = (self.head,)
        target.loader.load(self.head, folder)
        self.model.keep_states(head_config.layers)
        self.shape = block_shape(spec, 1, self.place.dtype)
        self.block_bytes = self.shape.num_bytes

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker, size=self._size, enter=self.head.taken)

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        return self.head.logits(features)
