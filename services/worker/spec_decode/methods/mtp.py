"""mtp: the multi-token prediction layer that some checkpoints have behind their last (DeepSeek-V3, arXiv 2412.19437,
section 2.2), as a drafter: one more decoder layer on the model's feature and the token behind it (features.py).

Embeddings and output head are the model's; checkpoints that repeat them (`embed_tokens`, `shared_head.head`) are not
read there. Drafts beyond the first come from the same layer, which then continues its own features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from services.worker.attention.backends import choose_attention
from services.worker.attention.port import AttentionBackend
from services.worker.attention.spec import attention_spec
from services.worker.kv.kv_cache import LayerCache
from services.worker.kv.kv_memory import block_shape
from services.worker.layers.norm.rms_norm import RMSNorm
from services.worker.layers.placement import Alternative, Destination, Loadable, Placement
from services.worker.models.causal_lm import CausalLM
from services.worker.models.mixture import MixtureLayer
from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.draft_models.eagle_head import TwoInputs
from services.worker.spec_decode.draft_models.features import FeatureProposer
from services.worker.spec_decode.drafter import DrafterWorker, Target
from services.worker.step.forward_batch import ForwardBatch


class Mtp:
    """The weights."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: Target) -> None:
        limits, self.model, self.place = target.limits, target.model, target.place
        spec = attention_spec(self.model.config, limits.block_size, self.place)
        self.head = MtpLayer(self.model, choose_attention(target.attention_backend, spec), self.place)
        target.loader.load(self.head, target.folder)
        self.shape = block_shape(spec, 1, self.place.dtype)
        self.block_bytes = self.shape.num_bytes

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker)

    def logits(self, features: Tensor) -> Tensor:
        return self.model.logits(self.head.norm(features))


class MtpLayer:
    """From features and the tokens behind them to features one position on, before their norm."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, place: Placement) -> None:
        config, index = model.config.with_next_layer(), model.config.num_layers
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        self._name, self._num_layers, self._cos_sin = name, index, model.cos_sin
        self._embed_norm = RMSNorm(f"{name}.enorm", size, eps, place)
        self._hidden_norm = RMSNorm(f"{name}.hnorm", size, eps, place)
        self._inputs = TwoInputs(f"{name}.eh_proj", size, place)
        self._layer = type(model).layer(index, config, backend, place)
        self.norm = RMSNorm(f"{name}.shared_head.norm", size, eps, place)
        self._parts: tuple[Loadable, ...] = (
            self._embed_norm,
            self._hidden_norm,
            self._inputs,
            self._layer,
            self.norm,
        )

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    @property
    def passed_over(self) -> tuple[str, ...]:
        """What is the model's, and the experts of other ranks."""
        layers = (f"model.layers.{index}." for index in range(self._num_layers))
        experts = self._layer.experts if isinstance(self._layer, MixtureLayer) else None
        absent = () if experts is None else experts.experts.absent
        repeated = (f"{self._name}.embed_tokens.", f"{self._name}.shared_head.head.")
        return (*layers, "model.embed_tokens.", "model.norm.", "lm_head.", *repeated, *absent)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        experts = self._layer.experts if isinstance(self._layer, MixtureLayer) else None
        return {} if experts is None else experts.alternatives

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        tokens: Tensor = model.embedding(batch.token_ids)
        residual = self._inputs(self._embed_norm(tokens), self._hidden_norm(features))
        x = self._layer(None, residual, batch, cache, self._cos_sin)
        if batch.logit_tokens is not None:
            x, residual = (t.index_select(0, batch.logit_tokens) for t in (x, residual))
        return x + residual
