"""The weights of an EAGLE head: one decoder layer behind a projection of two inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from services.worker.attention.port import AttentionBackend
from services.worker.kv.kv_cache import LayerCache
from services.worker.layers.placement import Alternative, Destination, Placement
from services.worker.layers.rms_norm import RMSNorm
from services.worker.layers.rotary import cos_sin_table
from services.worker.models.causal_lm import CausalLM
from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig
from services.worker.models.llama import LlamaLayer
from services.worker.step.forward_batch import ForwardBatch
from shared.errors import InvalidArgument

MODEL_TYPE = "quire_eagle"


def read_eagle(values: dict[str, Any], target: DecoderConfig) -> DecoderConfig:
    """`values`: the head's config.json. What it does not name is the model's."""
    config = ConfigFile(values)
    if config.get("model_type") != MODEL_TYPE:
        raise InvalidArgument(
            f"speculative_config.model: model_type is {config.get('model_type')!r}, an EAGLE head's is {MODEL_TYPE!r}",
            field="speculative_config",
        )
    head = replace(
        target,
        num_layers=1,
        attention_sinks=False,
        attention_softcap=0.0,
        experts=None,
        quantization=None,
        latent=None,
        attention_scale=None if target.latent else target.attention_scale,  # that of another head_dim
        sliding_windows=(0,),
        num_q_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=config.flag("qk_norm"),
    )
    for name, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.integer(name) != ours:
            raise InvalidArgument(
                f"speculative_config.model: the head's {name} is {config.integer(name)}, the model's {ours}",
                field="speculative_config",
            )
    return head


class EagleHead:
    """From features and the tokens behind them to features one position on."""

    passed_over = ()
    alternatives: ClassVar[dict[str, Alternative]] = {}

    def __init__(self, config: DecoderConfig, backend: AttentionBackend, place: Placement, num_positions: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._ops = place.ops
        self._embed_norm = RMSNorm("model.embed_norm", size, eps, place)
        self._hidden_norm = RMSNorm("model.hidden_norm", size, eps, place)
        self._layer = LlamaLayer(0, config, backend, place)
        self._norm = RMSNorm("model.norm", size, eps, place)
        self._fc: Tensor = place.empty(size, 2 * size)
        self._of_token: Any = None  # its two halves, as the ops want them, once loaded
        self._of_feature: Any = None
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).to(place.device)
        self._parts = (self._embed_norm, self._hidden_norm, self._layer, self._norm)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield "model.fc.weight", self._fc
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        halves = [half.contiguous() for half in self._fc.chunk(2, dim=1)]
        self._of_token, self._of_feature = (self._ops.prepare_linear(half, None) for half in halves)
        del self._fc
        for part in self._parts:
            part.finish()

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """`features` [num_tokens, hidden_size] of `model` -> those one position on, behind `batch.logit_tokens`."""
        tokens = self._embed_norm(model.embedding(batch.token_ids))
        x = self._ops.linear(tokens, self._of_token)
        residual = self._ops.linear(self._hidden_norm(features), self._of_feature)
        x = self._layer(x, residual, batch, cache, self._cos_sin)
        if batch.logit_tokens is not None:
            x, residual = (t.index_select(0, batch.logit_tokens) for t in (x, residual))
        made: Tensor = self._norm(x, residual)
        return made
