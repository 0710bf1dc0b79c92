"""Weights of an EAGLE head in the authors' format: one decoder layer after a projection of two inputs.

The published layer has no input norm and no output norm: its residual stream continues the model's features. Heads with
these norms are read by vLLM's names: `add_para_norm` (`enorm`, `hnorm`), `skip_prenorm` and `skip_output_norm`.
Embeddings and output head are the model's; copies of them in a checkpoint are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quire.services.worker.attention.port import AttentionBackend
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.attention.rotary import cos_sin_table
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Parsed config.json of a head, which is that of a decoder with one layer."""

    decoder: DecoderConfig
    norms_inputs: bool
    norms_layer: bool
    norms_output: bool


def read_eagle(values: dict[str, Any], target: DecoderConfig) -> EagleConfig:
    """Parses a head's config.json `values`. Raises InvalidArgument if it does not fit the target model."""
    config = ConfigFile(values)
    _check_fits(config, target)
    return EagleConfig(
        read_head_decoder(config),
        norms_inputs=config.flag("add_para_norm"),
        norms_layer=not config.flag("skip_prenorm", True),
        norms_output=not config.flag("skip_output_norm", True),
    )


def _check_fits(config: ConfigFile, target: DecoderConfig) -> None:
    """Raises InvalidArgument for an EAGLE-3 head, a head of several layers, and one whose hidden size or vocabulary is
    not the model's."""
    if config.has("draft_vocab_size") or "Eagle3" in _architectures(config):
        raise head_error('this is an EAGLE-3 head (draft_vocab_size, architectures); use the method "eagle3"')
    if config.integer("num_hidden_layers") != 1:
        raise head_error(f"num_hidden_layers is {config.integer('num_hidden_layers')}, it must be 1")
    for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.integer(name) != expected:
            raise head_error(f"the head's {name} is {config.integer(name)}, the model's {expected}")


def read_head_decoder(config: ConfigFile) -> DecoderConfig:
    """Parses a head's decoder configuration; its architecture name tells about query and key norms and projection
    biases."""
    names = _architectures(config)
    decoder, bias = read_decoder(config), config.flag("attention_bias")
    attention = AttentionConfig(
        qkv_bias=config.flag("qkv_bias", bias or "Qwen2" in names), o_bias=bias, qk_norm="Qwen3" in names
    )
    feed_forward = replace(decoder.feed_forward, bias=config.flag("mlp_bias"))
    return replace(decoder, attention=attention, feed_forward=feed_forward)


def _architectures(config: ConfigFile) -> str:
    return " ".join(map(str, config.get("architectures", [])))


def head_error(reason: str) -> InvalidArgument:
    """Returns an InvalidArgument about speculative_config.model with this reason, to be raised."""
    return InvalidArgument(f"speculative_config.model: {reason}", field="speculative_config")


class TwoInputLinear:
    """Linear layer over a token's embedding and a feature: one matrix [size, 2 * size], split in two when loaded, so
    that the inputs need not be concatenated."""

    def __init__(self, name: str, size: int, place: LayerPlacement) -> None:
        self._name, self._ops = name, place.ops
        self._weight: Tensor = place.empty(size, 2 * size)
        self.bias: Tensor = place.empty(size).zero_()  # some checkpoints have one
        self._of_token: Any = None  # the weight's two halves, prepared for the ops once loaded
        self._of_feature: Any = None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self._weight

    def finish(self) -> None:
        """Packs the two halves of the loaded weight for the ops and frees the whole one."""
        token, feature = (half.contiguous() for half in self._weight.chunk(2, dim=1))
        self._of_token = self._ops.prepare_linear(token, self.bias)
        self._of_feature = self._ops.prepare_linear(feature, None)
        del self._weight

    def __call__(self, token: Tensor, feature: Tensor) -> Tensor:
        """Returns [num_tokens, hidden_size] for two inputs of that shape, `token` (embeddings) and `feature`."""
        result: Tensor = self._ops.linear(token, self._of_token)
        result += self._ops.linear(feature, self._of_feature)
        return result


class EagleHead:
    """One decoder layer that computes features one position ahead from features and the tokens that follow them; the
    model's output head maps them to tokens."""

    passed_over = ("model.embed_tokens.weight", "lm_head.weight")  # copies of the model's

    def __init__(
        self, config: EagleConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.rms_norm_eps

        def norm(name: str, enabled: bool = True) -> RMSNorm | None:
            return RMSNorm(f"model.{name}", size, eps, place) if enabled else None

        layer = "layers.0"
        self._embed_norm, self._hidden_norm = (norm(name, config.norms_inputs) for name in ("enorm", "hnorm"))
        self._input_norm = norm(f"{layer}.input_layernorm", config.norms_layer)
        self._attention = Attention(f"model.{layer}.self_attn", decoder, 0, backend, place)
        self._middle_norm = RMSNorm(f"model.{layer}.post_attention_layernorm", size, eps, place)
        self._mlp = MLP(
            f"model.{layer}.mlp",
            size,
            decoder.intermediate_size,
            decoder.feed_forward.bias,
            place,
            activation=decoder.feed_forward.activation,
        )
        self._norm = norm("norm", config.norms_output)
        self._inputs = TwoInputLinear("model.fc", size, place)
        self._cos_sin = cos_sin_table(decoder.rope, decoder.head_dim, num_positions).to(place.device)
        norms = (self._embed_norm, self._hidden_norm, self._input_norm, self._middle_norm, self._norm)
        present = (each for each in norms if each is not None)
        self._parts: tuple[Loadable, ...] = (self._inputs, *present, self._attention, self._mlp)

    @property
    def alternatives(self) -> dict[str, Alternative]:
        return {"model.fc.bias": Alternative(self._inputs.bias, instead_of=())}

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Computes features one position ahead from `features` [num_tokens, hidden_size] and the batch's tokens, for
        `batch.logit_tokens` (None: all); writes the layer's KV to `cache`."""
        tokens: Tensor = model.embedding(batch.token_ids)
        if self._embed_norm is not None and self._hidden_norm is not None:
            tokens, features = self._embed_norm(tokens), self._hidden_norm(features)
        residual = self._inputs(tokens, features)
        x = residual if self._input_norm is None else self._input_norm(residual)
        attended = self._attention(x, batch, cache, self._cos_sin)
        x = self._mlp(self._middle_norm(attended, residual))
        if batch.logit_tokens is not None:
            x, residual = (t.index_select(0, batch.logit_tokens) for t in (x, residual))
        return x + residual if self._norm is None else self._norm(x, residual)
