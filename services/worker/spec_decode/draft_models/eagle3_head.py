"""Weights of an EAGLE-3 head in the authors' format: `fc` from three states of the model to a feature, a layer
(`midlayer`) whose attention reads the token's embedding and the feature concatenated, a norm, an output head.

The output head covers `draft_vocab_size` of the model's tokens: its token i is token i + d2t[i] of the model. It uses
the model's embeddings unless the head has another hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionBackend
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.attention.rotary import cos_sin_table
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.spec_decode.draft_models.eagle_head import head_error, read_head_decoder

NUM_STATES = 3
LAYER, OTHER_LAYER = "midlayer", "layers.0"  # the second as vLLM calls it


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Parsed config.json of a head, which is that of a decoder with one layer."""

    decoder: DecoderConfig
    vocab_size: int  # tokens of the output head
    layers: tuple[int, ...]  # layers of the model whose inputs the head reads
    norms_residual: bool


def read_eagle3(values: dict[str, Any], target: DecoderConfig) -> Eagle3Config:
    """Parses a head's config.json `values`. Raises InvalidArgument if it does not fit the target model."""
    config = ConfigFile(values)
    if config.integer("num_hidden_layers") != 1:
        raise head_error(f"num_hidden_layers is {config.integer('num_hidden_layers')}, it must be 1")
    for name, expected in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        value = config.integer(name, expected)
        if value != expected:
            raise head_error(f"the head's {name} is {value}, the model's {expected}")
    decoder = read_head_decoder(config)
    vocab_size = config.integer("draft_vocab_size", target.vocab_size)
    if not 1 <= vocab_size <= target.vocab_size:
        raise head_error(f"draft_vocab_size is {vocab_size}, the model has {target.vocab_size} tokens")
    return Eagle3Config(decoder, vocab_size, _layers(config, target.num_layers), config.flag("norm_before_residual"))


def _layers(config: ConfigFile, count: int) -> tuple[int, ...]:
    """Returns the model's layers that the head reads: those that config.json names, else the authors' default: the
    third, the middle and the third to last. Raises InvalidArgument unless they are three layers of the model."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("eagle_config", {})
    layer_ids = (inner.get(name) if isinstance(inner, dict) else None) or config.get(name, None)
    if layer_ids is None:
        layer_ids = [2, count // 2, count - 3]
        if count <= NUM_STATES or not layer_ids[0] <= layer_ids[1] <= layer_ids[2]:
            layer_ids = [0, count // 2, count - 1]
    fits = isinstance(layer_ids, list) and len(layer_ids) == NUM_STATES
    if not fits or any(type(layer) is not int or not 0 <= layer < count for layer in layer_ids):
        raise head_error(f"{name} is {layer_ids!r}: {NUM_STATES} layers of the model's {count} are needed")
    return tuple(layer_ids)


class WideAttention(Attention):
    """Attention over two concatenated vectors, [num_tokens, 2 * hidden_size], with one vector of hidden_size as
    output."""

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.o_proj", config.hidden_size // 2)


class Eagle3Head:
    """One decoder layer that computes features one position ahead from features and the tokens that follow them, with
    an output head over a part of the vocabulary."""

    def __init__(
        self,
        config: Eagle3Config,
        target: DecoderConfig,
        names: Collection[str],
        backend: AttentionBackend,
        *,
        place: LayerPlacement,
        num_positions: int,
    ) -> None:
        """`names`: tensor names of the checkpoint; empty for random weights."""
        decoder = config.decoder
        size, eps, self._vocab_size = decoder.hidden_size, decoder.rms_norm_eps, target.vocab_size
        layer = OTHER_LAYER if any(name.startswith(f"{OTHER_LAYER}.") for name in names) else LAYER
        self._ops, self._norms_residual = place.ops, config.norms_residual
        shares_embedding = size == target.hidden_size
        self._embedding = None if shares_embedding else Embedding("embed_tokens", target.vocab_size, size, place)
        self._embed_norm = RMSNorm(f"{layer}.input_layernorm", size, eps, place)
        self._feature_norm = RMSNorm(f"{layer}.hidden_norm", size, eps, place)
        wide = replace(decoder, hidden_size=2 * size)
        self._attention = WideAttention(f"{layer}.self_attn", wide, 0, backend, place)
        self._middle_norm = RMSNorm(f"{layer}.post_attention_layernorm", size, eps, place)
        dense = decoder.feed_forward
        self._mlp = MLP(f"{layer}.mlp", size, decoder.intermediate_size, dense.bias, place, activation=dense.activation)
        self._norm = RMSNorm("norm", size, eps, place)
        self._fc: Tensor = place.empty(size, NUM_STATES * target.hidden_size)
        self._output: Tensor = place.empty(config.vocab_size, size)
        self._offsets = torch.zeros(config.vocab_size, dtype=torch.int64, device=place.device)
        self._is_mapped = "d2t" in names or (bool(names) and config.vocab_size < target.vocab_size)
        self._token_ids: Tensor | None = None  # the model's id of each token, once loaded; None: identical
        self._of_states: Any = None
        self._to_logits: Any = None
        self._cos_sin = cos_sin_table(decoder.rope, decoder.head_dim, num_positions).to(place.device)
        own = () if self._embedding is None else (self._embedding,)
        norms = (self._embed_norm, self._feature_norm, self._middle_norm, self._norm)
        self._parts: tuple[Loadable, ...] = (*own, *norms, self._attention, self._mlp)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that are not loaded: `t2d` repeats `d2t`."""
        return ("t2d", "embed_tokens.weight") if self._embedding is None else ("t2d",)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield "fc.weight", self._fc
        yield "lm_head.weight", self._output
        if self._is_mapped:
            yield "d2t", self._offsets
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        """Packs the loaded weights and turns d2t into token ids. Raises InvalidArgument if one of them is not a token
        of the model."""
        self._of_states = self._ops.prepare_linear(self._fc, None)
        self._to_logits = self._ops.prepare_linear(self._output, None)
        del self._fc
        token_ids = torch.arange(len(self._offsets), device=self._offsets.device) + self._offsets
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._vocab_size:
            wrong = int(token_ids.max()) if int(token_ids.min()) >= 0 else int(token_ids.min())
            raise head_error(f"d2t points to token {wrong}, the model has {self._vocab_size}")
        self._token_ids = token_ids if self._is_mapped or len(token_ids) < self._vocab_size else None
        for part in self._parts:
            part.finish()

    def project_states(self, features: Tensor) -> Tensor:
        """Projects the three kept states of the model to one feature, [num_tokens, size]; `features` [num_tokens, 4 *
        hidden_size] has the model's hidden state first, which is not used."""
        states = features[:, features.size(1) // (1 + NUM_STATES) :]
        projected: Tensor = self._ops.linear(states.contiguous(), self._of_states)
        return projected

    def logits(self, features: Tensor) -> Tensor:
        """Returns [num_tokens, vocab_size]; tokens that the head does not cover are -inf."""
        logits: Tensor = self._ops.linear(self._norm(features), self._to_logits)
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_ids, logits)

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Computes features one position ahead, before the final norm, from `features` [num_tokens, size] and the
        batch's tokens, for `batch.logit_tokens` (None: all); writes the layer's KV to `cache`."""
        embedding = model.embedding if self._embedding is None else self._embedding
        normed = self._feature_norm(features)
        residual = normed.clone() if self._norms_residual else features.clone()
        both = torch.cat((self._embed_norm(embedding(batch.token_ids)), normed), dim=1)
        attended = self._attention(both, batch, cache, self._cos_sin)
        x = self._mlp(self._middle_norm(attended, residual))
        if batch.logit_tokens is not None:
            x, residual = (t.index_select(0, batch.logit_tokens) for t in (x, residual))
        return x + residual
