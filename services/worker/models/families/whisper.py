"""Whisper (WhisperForConditionalGeneration, arXiv 2212.04356): a decoder with cross attention to an encoder of
sound."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.attention.cross_attention import CrossAttention, CrossProjections
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.audio.whisper import WhisperSound
from quire.services.worker.models.audio.whisper_encoder import WhisperEncoderConfig, read_whisper_encoder
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.config.size_bounds import check_sizes
from quire.services.worker.models.positions import LearnedPositions
from quire.services.worker.models.prenorm import PrenormLayer
from quire.shared.kv.kv_specs import FULL, Cross, LayerSpec
from quire.shared.media.modalities import AUDIO

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.placement import LayerPlacement

# Its names of common config.json fields.
NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "decoder_ffn_dim",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "max_position_embeddings": "max_target_positions",
    "hidden_act": "activation_function",
}
EPS = 1e-5
HEAD = "proj_out.weight"  # tied to the embedding


@dataclass(frozen=True, slots=True)
class WhisperConfig(DecoderConfig):
    """Configuration of the decoder, with that of its encoder."""

    encoder: WhisperEncoderConfig | None = None


class WhisperAttention(Attention):
    """Self attention whose keys have no bias and whose output projection is named `out_proj`."""

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        keys = Projection(f"{name}.k_proj", kv_size, has_bias=False)
        return [Projection(f"{name}.q_proj", q_size), keys, Projection(f"{name}.v_proj", kv_size)]

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.out_proj", config.hidden_size)


class WhisperLayer(PrenormLayer):
    """Pre-norm layer with cross attention between self attention and feed-forward."""

    def __init__(self, name: str, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> None:
        size, attention = config.hidden_size, f"{name}.encoder_attn"
        up, down = Projection(f"{name}.fc1", config.intermediate_size), Projection(f"{name}.fc2", size)
        super().__init__(
            LayerNorm(f"{name}.self_attn_layer_norm", size, EPS, place),
            WhisperAttention(f"{name}.self_attn", config, 0, backend, place),
            LayerNorm(f"{name}.final_layer_norm", size, EPS, place),
            PlainMLP(up, down, size, True, place, activation=config.feed_forward.activation),
        )
        projections = CrossProjections(
            Projection(f"{attention}.q_proj", size),
            Projection(f"{attention}.k_proj", size, has_bias=False),
            Projection(f"{attention}.v_proj", size),
            Projection(f"{attention}.out_proj", size),
            bias=True,
        )
        self._cross_norm = LayerNorm(f"{name}.encoder_attn_layer_norm", size, EPS, place)
        self.cross = CrossAttention(projections, config, backend, place)
        self._parts = (*self._parts, self._cross_norm, self.cross)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends to the tokens before and to the encoder's output, adding both to the residual in place; returns the
        feed-forward of the normed sum."""
        update = self._attention.attend(q, cache, metadata)
        if metadata.cross is not None:
            assert cache.cross is not None, "the layer has a cache for encoder outputs"
            update = self.cross(self._cross_norm(update, residual), cache.cross, metadata.cross)
        return self.mlp(self._second(update, residual))


class WhisperForConditionalGeneration(LearnedPositions):
    """Whisper in all sizes, English only or multilingual, and its distilled versions."""

    embedding_name: ClassVar[str] = "model.decoder.embed_tokens"
    positions_name: ClassVar[str] = "model.decoder.embed_positions"
    encoded: ClassVar[tuple[str, ...]] = (AUDIO,)

    @staticmethod
    def read(config: ConfigFile) -> WhisperConfig:
        """Reads config.json under Whisper's field names; scale_embedding has no effect, as in transformers. Raises
        InvalidArgument for sizes out of range and for an output head of its own."""
        values = {"tie_word_embeddings": True, "activation_function": "gelu", "max_target_positions": 448}
        values |= config.values
        named = values | {ours: values.get(theirs) for ours, theirs in NAMES.items()}
        named |= {"num_key_value_heads": None, "head_dim": None}  # multi-head attention
        check_sizes(named)
        decoder = read_decoder(ConfigFile(named), rope=NO_ROPE, activations=KNOWN)
        if not decoder.tie_word_embeddings:
            raise refusal("tie_word_embeddings", False, "an output head of its own is not supported; true is")
        decoder = replace(
            decoder,
            rms_norm_eps=EPS,
            attention=AttentionConfig(qkv_bias=True, o_bias=True),
            feed_forward=replace(decoder.feed_forward, bias=True),
        )
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return WhisperConfig(**known, encoder=read_whisper_encoder(config.without("scale_embedding")))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> WhisperLayer:
        return WhisperLayer(f"model.decoder.layers.{index}", config, backend, place)

    @classmethod
    def final_norm(cls, config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        """Returns the norm after the last layer."""
        return LayerNorm("model.decoder.layer_norm", config.hidden_size, EPS, place)

    @staticmethod
    def kv_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
        """Returns that each layer keeps the keys and values of all tokens, and those of the encoder's output."""
        return ((FULL, Cross(_encoder_of(config).max_positions)),) * config.num_layers

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore: those of the encoder, and the tied output head."""
        return (*super().passed_over, "model.encoder.", "encoder.", HEAD)

    @property
    def cross_layers(self) -> list[CrossAttention]:
        """Cross attention of each layer, whose heads follow the speech."""
        return [layer.cross for layer in self.layers if isinstance(layer, WhisperLayer)]

    def new_encoder(self, place: LayerPlacement) -> WhisperSound:
        """Returns the encoder without weights."""
        return WhisperSound(_encoder_of(self.config), place)

    def store_cross(self, rows: Tensor, tokens: Tensor, caches: list[LayerCache]) -> None:
        """Computes keys and values of each layer from the encoder's `rows` [num_rows, hidden_size] and writes them to
        the places `tokens` (block * block_size + offset), int64 [num_rows]."""
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, WhisperLayer)
            assert cache.cross is not None, "every layer attends to the encoder's output"
            layer.cross.store(rows, tokens, cache.cross)


def _encoder_of(config: DecoderConfig) -> WhisperEncoderConfig:
    assert isinstance(config, WhisperConfig)
    assert config.encoder is not None, "read() sets it"
    return config.encoder
