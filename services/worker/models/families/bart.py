"""BART and mBART (arXiv 1910.13461, 2001.08210): encoder-decoder models of text with learned positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.cross_attention import CrossAttention, CrossProjections
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.sharding import portion
from quire.services.worker.models.config.block_config import AttentionConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.config.size_bounds import check_sizes
from quire.services.worker.models.cross_layer import CrossLayer, CrossNorms, PostnormCrossLayer, store_cross
from quire.services.worker.models.families.opt import OptAttention
from quire.services.worker.models.positions import LearnedPositions
from quire.services.worker.models.text_encoders.bart_encoder import (
    COPIES,
    EPS,
    FIRST_ROW,
    SHARED,
    BartEncoder,
    BartSizes,
    of_copies,
)
from quire.shared.kv.kv_specs import FULL, Cross, LayerSpec
from quire.shared.media.modalities import TEXT
from quire.shared.models.text_encoders import read_text_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement

LAYERS = "model.decoder.layers"
LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True, slots=True)
class BartConfig(DecoderConfig):
    """Configuration of the decoder, with that of its encoder."""

    sizes: BartSizes | None = None


class BartForConditionalGeneration(LearnedPositions):
    """BART in all sizes."""

    embedding_name: ClassVar[str] = SHARED
    positions_name: ClassVar[str] = "model.decoder.embed_positions"
    first_row: ClassVar[int] = FIRST_ROW
    encoded: ClassVar[tuple[str, ...]] = (TEXT,)
    norms_first: ClassVar[bool] = False

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        super().__init__(config, backend, place, num_positions)
        self._rows = place.shard.rows(config.vocab_size)
        self._logits_bias: Tensor = place.empty(1, len(self._rows))

    @classmethod
    def read(cls, config: ConfigFile) -> BartConfig:
        """Reads config.json under BART's field names. Raises InvalidArgument for sizes out of range and for an output
        head of its own."""
        values = {"activation_function": "gelu", "tie_word_embeddings": True, **config.values}
        named = {
            **values,
            "hidden_size": config.integer("d_model", 1024),
            "intermediate_size": config.integer("decoder_ffn_dim", 4096),
            "num_hidden_layers": config.integer("decoder_layers", 12),
            "num_attention_heads": config.integer("decoder_attention_heads", 16),
            "max_position_embeddings": read_text_encoder(config.values).max_tokens,
            "hidden_act": values["activation_function"],
            "num_key_value_heads": None,  # multi-head attention
            "head_dim": None,
        }
        check_sizes(named)
        decoder = read_decoder(ConfigFile(named), rope=NO_ROPE, activations=KNOWN)
        if not decoder.tie_word_embeddings:
            raise refusal("tie_word_embeddings", False, "an output head of its own is not supported; true is")
        sizes = _read_sizes(config, decoder, norms_first=cls.norms_first)
        decoder = replace(
            decoder,
            rms_norm_eps=EPS,
            attention=AttentionConfig(qkv_bias=True, o_bias=True),
            feed_forward=replace(decoder.feed_forward, bias=True),
            scales=ScaleConfig(embedding=sizes.scale),
        )
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return BartConfig(**known, sizes=sizes)

    @classmethod
    def layer(cls, index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> CrossLayer:
        """Returns the layer at `index`. Where norms follow the parts, its first norm is that of the layer before it."""
        name, size, attention = f"{LAYERS}.{index}", config.hidden_size, f"{LAYERS}.{index}.encoder_attn"
        before = f"{LAYERS}.{index - 1}.final_layer_norm" if index else "model.decoder.layernorm_embedding"
        own = [f"{name}.{part}_layer_norm" for part in ("self_attn", "encoder_attn", "final")]
        norms = CrossNorms(
            *(LayerNorm(norm, size, EPS, place) for norm in (own if cls.norms_first else [before, *own[:2]]))
        )
        queries, keys, values, output = (
            Projection(f"{attention}.{part}_proj", size) for part in ("q", "k", "v", "out")
        )
        projections = CrossProjections(queries, keys, values, output, bias=True)
        up, down = Projection(f"{name}.fc1", config.intermediate_size), Projection(f"{name}.fc2", size)
        return (CrossLayer if cls.norms_first else PostnormCrossLayer)(
            norms,
            OptAttention(f"{name}.self_attn", config, 0, backend, place),
            CrossAttention(projections, config, backend, place),
            PlainMLP(up, down, size, True, place, activation=config.feed_forward.activation),
        )

    @classmethod
    def final_norm(cls, config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        """Returns the norm after the last layer, with the inverse of the embedding's scale, as the head is tied."""
        last = f"{LAYERS}.{config.num_layers - 1}.final_layer_norm"
        name = "model.decoder.layer_norm" if cls.norms_first else last
        return LayerNorm(name, config.hidden_size, EPS, place, scale=1 / config.scales.embedding)

    @staticmethod
    def kv_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
        """Returns that each layer keeps the keys and values of all tokens, and those of the encoder's output."""
        return ((FULL, Cross(_sizes_of(config).max_tokens)),) * config.num_layers

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore: those of the encoder, and copies of the embedding."""
        return (*super().passed_over, "model.encoder.", "encoder.", *COPIES, f"{SHARED}.weight")

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Copies of the embedding, of which some files have only one."""
        return of_copies(self.embedding)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations()
        yield LOGITS_BIAS, portion(self._logits_bias, 1, (self._rows,), self.config.vocab_size)

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """Returns logits as CausalLM.logits(), with the bias of each token."""
        found = super().logits(hidden, *adapted)
        found[:, : len(self._rows)] += self._logits_bias
        return found

    def new_encoder(self, place: LayerPlacement) -> BartEncoder:
        """Returns the encoder without weights."""
        return BartEncoder(_sizes_of(self.config), place)

    def store_cross(self, rows: Tensor, tokens: Tensor, caches: list[LayerCache]) -> None:
        """Writes keys and values of the encoder's `rows` to the places `tokens` of all layers."""
        store_cross(self.layers, rows, tokens, caches)


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """mBART and mBART-50, whose layers have their norms before each part."""

    norms_first: ClassVar[bool] = True

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        super().__init__(config, backend, place, num_positions)
        self._embedding_norm = LayerNorm("model.decoder.layernorm_embedding", config.hidden_size, EPS, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations()
        yield from self._embedding_norm.destinations()

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the norm of the embeddings, [num_tokens, hidden_size], in new memory."""
        return self._embedding_norm(super().embed(batch))


def _read_sizes(config: ConfigFile, decoder: DecoderConfig, *, norms_first: bool) -> BartSizes:
    """Reads the sizes of the encoder. Raises InvalidArgument."""
    heads = config.integer("encoder_attention_heads", 16)
    layers, width = config.integer("encoder_layers", 12), config.integer("encoder_ffn_dim", 4096)
    check_sizes({"num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": width})
    if decoder.hidden_size % heads:
        raise refusal("encoder_attention_heads", heads, f"must divide d_model, {decoder.hidden_size}")
    return BartSizes(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        num_heads=heads,
        intermediate_size=width,
        num_layers=layers,
        max_tokens=decoder.max_positions,
        activation=decoder.feed_forward.activation,
        scale=decoder.hidden_size**0.5 if config.flag("scale_embedding") else 1.0,
        norms_first=norms_first,
    )


def _sizes_of(config: DecoderConfig) -> BartSizes:
    assert isinstance(config, BartConfig)
    assert config.sizes is not None, "read() sets it"
    return config.sizes
