"""mtp: drafts with the multi-token prediction layers that some checkpoints have after their last layer (DeepSeek-V3,
arXiv 2412.19437, section 2.2): decoder layers over the model's feature and the next tokens (module_chain.py).

Embeddings and output head are the model's; copies in the checkpoint (`embed_tokens`, `shared_head.head`) are not
loaded. Each layer makes one draft; further drafts come from the last layer, which continues its own features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.attention.port import AttentionBackend
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.kv_memory import block_shape
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.mixture import MixtureLayer
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.eagle_head import TwoInputLinear
from quire.services.worker.spec_decode.draft_models.feature_proposer import FeatureProposer
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget


class Mtp:
    """Weights of the multi-token prediction layers of the served checkpoint, at most num_speculative_tokens of them,
    loaded when constructed."""

    needs_features = needs_prompts = True

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        limits, self.model, self.place = target.limits, target.model, target.place
        spec = attention_spec(self.model.config, limits.block_size, self.place)
        backend = choose_attention(target.attention_backend, spec)
        num_heads = min(
            self.model.config.num_next_layers, settings.num_speculative_tokens
        )  # more layers would make no draft
        self.heads = tuple(MtpLayer(self.model, depth, backend, self.place) for depth in range(num_heads))
        for head in self.heads:
            target.loader.load(head, target.folder)
        self.shape = block_shape(spec, num_heads, self.place.dtype)
        self.block_bytes = self.shape.num_bytes

    def start(self, worker: DrafterWorker) -> FeatureProposer:
        return FeatureProposer(self, worker)

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        return self.model.whole_logits(self.heads[depth].norm(features))


class MtpLayer:
    """Decoder layer that computes features one token further, before its final norm `norm`, from features and the
    tokens that follow them."""

    def __init__(self, model: CausalLM, depth: int, backend: AttentionBackend, place: LayerPlacement) -> None:
        """`depth`: number of such layers before this one."""
        config, index = model.config.with_next_layers(), model.config.num_layers + depth
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        self._name, self._cos_sin = name, model.cos_sin
        self._others = tuple(f"model.layers.{i}." for i in range(config.num_layers) if i != index)
        self._embed_norm = RMSNorm(f"{name}.enorm", size, eps, place)
        self._hidden_norm = RMSNorm(f"{name}.hnorm", size, eps, place)
        self._inputs = TwoInputLinear(f"{name}.eh_proj", size, place)
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
        """Tensors that are not loaded here: the model's, those of other such layers, and experts of other ranks."""
        experts = self._layer.experts if isinstance(self._layer, MixtureLayer) else None
        absent = () if experts is None else experts.experts.absent
        repeated = (f"{self._name}.embed_tokens.", f"{self._name}.shared_head.head.")
        return (*self._others, "model.embed_tokens.", "model.norm.", "lm_head.", *repeated, *absent)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        experts = self._layer.experts if isinstance(self._layer, MixtureLayer) else None
        return {} if experts is None else experts.alternatives

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Computes features from `features` [num_tokens, hidden_size] and the batch's tokens, for `batch.logit_tokens`
        (None: all); writes the layer's KV to `cache`."""
        tokens: Tensor = model.embedding(batch.token_ids)
        residual = self._inputs(self._embed_norm(tokens), self._hidden_norm(features))
        x = self._layer(None, residual, batch, cache, self._cos_sin)
        if batch.logit_tokens is not None:
            x, residual = (t.index_select(0, batch.logit_tokens) for t in (x, residual))
        return x + residual
