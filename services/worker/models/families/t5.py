"""T5, T5 1.1, Flan-T5, mT5 and UMT5 (arXiv 1910.10683, 2010.11934): encoder-decoder models of text with relative
positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.cross_attention import CrossAttention, CrossProjections
from quire.services.worker.layers.attention.relative_attention import RelativeAttention, RelativeBias
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.config.size_bounds import check_sizes
from quire.services.worker.models.cross_layer import CrossLayer, CrossNorms, store_cross
from quire.services.worker.models.text_encoders.t5_encoder import T5Encoder, T5Sizes
from quire.shared.kv.kv_specs import FULL, Cross, LayerSpec
from quire.shared.media.modalities import TEXT
from quire.shared.models.text_encoders import read_text_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.placement import Destination, LayerPlacement

GATED = "gated-"
NEW_GELU = "gelu_new"  # what `gated-gelu` means
SHARED = "relative_attention_bias"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of the embedding, in published files
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclass(frozen=True, slots=True)
class T5Config(DecoderConfig):
    """Configuration of the decoder, with that of its encoder."""

    sizes: T5Sizes | None = None


class T5SelfAttention(RelativeAttention):
    """Self attention with T5's names of tensors."""

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        return [Projection(f"{name}.{part}", q_size) for part in "qkv"]

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.o", config.hidden_size)


class T5ForConditionalGeneration(CausalLM):
    """T5 of any version; UMT5's layers have biases of their own."""

    embedding_name: ClassVar[str] = "shared"
    norm_name: ClassVar[str] = "decoder.final_layer_norm"
    encoded: ClassVar[tuple[str, ...]] = (TEXT,)
    records_decodes: ClassVar[bool] = False  # attention with biases copies as many positions as a step has

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        """Builds the layers, the first of which has the biases of all of them, or each its own."""
        super().__init__(config, backend, place, num_positions)
        sizes, self._biases = sizes_of(config), list[RelativeBias]()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, CrossLayer)
            assert isinstance(layer.attention, RelativeAttention)
            if not index or sizes.bias_by_layer:
                name = f"decoder.block.{index}.layer.0.SelfAttention.{SHARED}"
                buckets = sizes.buckets(has_future=False)
                self._biases.append(RelativeBias(name, sizes.num_heads, buckets, num_positions, place))
            layer.attention.bias = self._biases[-1]

    @staticmethod
    def read(config: ConfigFile) -> T5Config:
        """Reads config.json under T5's field names. Raises InvalidArgument for sizes out of range and for unknown
        activations."""
        sizes = read_sizes(config)
        named = {
            **config.values,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": config.integer("num_decoder_layers", sizes.num_layers),
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": None,
            "head_dim": sizes.head_dim,
            "hidden_act": sizes.activation,
            "rms_norm_eps": sizes.eps,
            "max_position_embeddings": sizes.max_tokens,
            "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        }
        check_sizes(named)
        decoder = read_decoder(ConfigFile(named), rope=NO_ROPE, activations=KNOWN)
        scales = ScaleConfig(logit=sizes.hidden_size**-0.5 if _scales_logits(config) else 1.0)
        decoder = replace(decoder, attention=AttentionConfig(scale=1.0), scales=scales)
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return T5Config(**known, sizes=sizes)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> CrossLayer:
        name, size, sizes = f"decoder.block.{index}.layer", config.hidden_size, sizes_of(config)
        attention, inner = f"{name}.1.EncDecAttention", sizes.num_heads * sizes.head_dim
        queries, keys, values = (Projection(f"{attention}.{part}", inner) for part in "qkv")
        projections = CrossProjections(queries, keys, values, Projection(f"{attention}.o", size), bias=False)
        first, second, third = (RMSNorm(f"{name}.{part}.layer_norm", size, sizes.eps, place) for part in range(3))
        return CrossLayer(
            CrossNorms(first, second, third),
            T5SelfAttention(f"{name}.0.SelfAttention", config, 0, backend, place),
            CrossAttention(projections, config, backend, place),
            sizes.feed_forward(f"{name}.2.DenseReluDense", place),
        )

    @staticmethod
    def kv_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
        """Returns that each layer keeps the keys and values of all tokens, and those of the encoder's output."""
        return ((FULL, Cross(sizes_of(config).max_tokens)),) * config.num_layers

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore: those of the encoder, and copies of the embedding."""
        return (*super().passed_over, "encoder.", *COPIES, UNUSED)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations()
        for bias in self._biases:
            yield from bias.destinations()

    def finish(self) -> None:
        super().finish()
        for bias in self._biases:
            bias.finish()

    def new_encoder(self, place: LayerPlacement) -> T5Encoder:
        """Returns the encoder without weights."""
        return T5Encoder(sizes_of(self.config), place)

    def store_cross(self, rows: Tensor, tokens: Tensor, caches: list[LayerCache]) -> None:
        """Writes keys and values of the encoder's `rows` to the places `tokens` of all layers."""
        store_cross(self.layers, rows, tokens, caches)


def read_sizes(config: ConfigFile) -> T5Sizes:
    """Reads the sizes of T5's config.json. Raises InvalidArgument."""
    known = {"d_kv": "head_dim", "d_ff": "intermediate_size", "num_heads": "num_attention_heads"}
    check_sizes({ours: config.values.get(theirs) for theirs, ours in known.items()})
    buckets = config.integer("relative_attention_num_buckets", 32)
    distance = config.integer("relative_attention_max_distance", 128)
    if not 4 <= buckets <= 1 << 16:
        raise refusal("relative_attention_num_buckets", buckets, "must be from 4 to 65536")
    if not buckets // 2 < distance <= 1 << 24:
        raise refusal("relative_attention_max_distance", distance, f"must be from {buckets // 2 + 1} to {1 << 24}")
    form = config.text("feed_forward_proj", "relu")
    activation = NEW_GELU if form == f"{GATED}gelu" else form.removeprefix(GATED)
    return T5Sizes(
        vocab_size=config.integer("vocab_size", 32_128),
        hidden_size=config.integer("d_model", 512),
        head_dim=config.integer("d_kv", 64),
        num_heads=config.integer("num_heads", 8),
        intermediate_size=config.integer("d_ff", 2048),
        num_layers=config.integer("num_layers", 6),
        max_tokens=read_text_encoder(config.values).max_tokens,
        eps=config.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        is_gated=form.startswith(GATED),
        num_buckets=buckets,
        max_distance=distance,
        bias_by_layer=config.get("model_type") == "umt5",
    )


def sizes_of(config: DecoderConfig) -> T5Sizes:
    """Returns the sizes that read() has found."""
    assert isinstance(config, T5Config)
    assert config.sizes is not None, "read() sets it"
    return config.sizes


def _scales_logits(config: ConfigFile) -> bool:
    """Returns whether the output head gets hidden states times hidden_size ** -0.5; mT5's never does. Files without
    `scale_decoder_outputs`, which transformers 5 writes, mean it by a tied output head."""
    return config.get("model_type") != "mt5" and config.flag(
        "scale_decoder_outputs", config.flag("tie_word_embeddings", True)
    )
