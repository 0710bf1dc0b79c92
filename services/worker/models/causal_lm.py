"""What decoder-only language models have in common: an embedding, layers beside a residual stream, a norm, a head.

A family is a class in a file of its own, found by `registry`. It says how its config.json is read and what its layers
are made of; the rest of the worker knows the face of CausalLM and never a layer's insides. What makes some models
faster than one call a kernel stands beside it: layer_stack.py, single_row.py, taped.py, deferred_all_reduce.py.
`single_row` and `taped_functions` say what a family offers; not where a family that inherits them computes in another
way what is around its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.rotary import cos_sin_table
from quire.services.worker.layers.classifier import Classifier
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.embedding import Embedding, OutputHead, TiedOutputHead
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.decoder_layer import DecoderLayer, Norm
from quire.services.worker.models.deferred_all_reduce import defer_all_reduces
from quire.services.worker.models.layer_stack import LayerStack, State, joined
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import FULL, KVSpec, Latent, LayerSpec, Window

if TYPE_CHECKING:  # this module is also read where there is no torch, to check a config.json
    from torch import Tensor

    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable

TIED_HEAD = "lm_head.weight"


class CausalLM(ABC):
    """Tokens to logits."""

    # Functions of `kernels` that forward() consists of, so that a tape can record it; none: it cannot.
    taped_functions: ClassVar[tuple[str, ...]] = ()
    embedding_name: ClassVar[str] = "model.embed_tokens"
    norm_name: ClassVar[str] = "model.norm"

    classifier: Classifier | None = None

    # Of the first stage of a pipeline alone.
    embedding: Embedding
    head: OutputHead | TiedOutputHead

    # Tokens that each expert has had, int64 [layers with experts, num_experts], and which layers these are.
    expert_counts: tuple[Tensor, tuple[int, ...]] | None = None

    # Layers whose input goes behind the hidden states, for a drafter that reads it (keep_states).
    kept_layers: tuple[int, ...] = ()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states [num_samples, hidden_width] of the tokens whose logits are wanted."""
        return joined(*self.run(batch, caches))

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> tuple[Tensor, list[State]]:
        """Hidden states [num_samples, hidden_size], and those that are kept."""
        residual = self.embed(batch)
        if self.kept_layers:
            return self._stack.normed_and_kept(self.kept_layers, residual, batch, caches)
        return self._stack.normed(residual, batch, caches), []

    def first_layers(self, residual: Tensor, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """The residual stream after the layers of this stage, where other stages follow; may change `residual`."""
        return residual.add_(self._stack.through(residual, batch, caches))

    def last_layers(self, residual: Tensor, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states, as forward(), from the residual stream before the first layer of the last stage; may change
        `residual`."""
        return self._stack.normed(residual, batch, caches)

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        """`num_positions`: longest sequence that will be run."""
        self.config, self._logit_cap = config, config.scales.logit_cap
        self.stage, self.shard = place.stage, place.shard
        self._edges: tuple[Loadable, ...] = ()
        if self.stage.is_first:
            self.embedding = Embedding(
                self.embedding_name, config.vocab_size, config.hidden_size, place, config.scales.embedding, adapted=True
            )
            self.head = (
                TiedOutputHead(self.embedding, place)
                if config.tie_word_embeddings
                else OutputHead(config.vocab_size, config.hidden_size, place)
            )
            self._edges = (self.embedding, self.head)
        self.here = self.stage.layers(config.num_layers, head_layers(config))
        self.layers = [self.layer(index, config, backend, place) for index in self.here]
        self.norm = self.final_norm(config, place)
        self.classifier = (
            Classifier("score", config.num_classes, config.hidden_size, place) if config.num_classes else None
        )
        tables = {
            rope: cos_sin_table(rope, config.rope_dim, num_positions).to(place.device)
            for rope in (config.rope, *config.ropes)
        }
        self.cos_sin: Tensor = tables[config.rope]
        ropes = config.ropes or (config.rope,) * config.num_layers
        self._collectives = place.shard.collectives
        self._defer_all_reduces()
        self._finished: set[int] = set()  # places of layers, while weights are loaded
        rotations = [tables[ropes[index]] for index in self.here]
        self._stack = LayerStack(self.layers, rotations, self.norm, place.ops.embed)

    @classmethod
    def final_norm(cls, config: DecoderConfig, place: LayerPlacement) -> Norm:
        """Where all logits are multiplied, this one is: a table of embeddings may be the output head, too."""
        tied = config.scales.embedding if config.tie_word_embeddings else 1.0
        scale, offset = config.scales.logit / tied, config.scales.norm_offset
        return RMSNorm(cls.norm_name, config.hidden_size, config.rms_norm_eps, place, offset=offset, scale=scale)

    @staticmethod
    @abstractmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Raises InvalidArgument for what would be computed otherwise than it is meant. Needs no torch."""

    @staticmethod
    @abstractmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> DecoderLayer: ...

    @staticmethod
    def kv_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
        """What each layer keeps of the tokens before."""
        if config.latent is not None:
            return (Latent(config.latent.kv_rank, config.latent.rope_dim),) * config.num_layers
        attended: tuple[KVSpec, ...] = tuple(Window(length) if length else FULL for length in config.sliding_windows)
        if config.recurrent is None:
            return attended
        state, recurs = config.recurrent.spec, config.recurrent.layers
        if config.recurrent.beside_attention:
            return tuple((spec, state) if here else spec for spec, here in zip(attended, recurs, strict=True))
        return tuple(state if here else spec for spec, here in zip(attended, recurs, strict=True))

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        """Why steps of one token cannot run as a chain of fused kernels here; None if they can (single_row.py)."""
        return "this family has no chain of fused kernels"

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Tensors that checkpoints may repeat although the model has them under another name."""
        return (TIED_HEAD,) if self.config.tie_word_embeddings else ()

    def is_on_other_stage(self, name: str) -> bool:
        """Whether another stage of the pipeline has this tensor of the checkpoint, if this one does not."""
        if self.stage.is_whole:
            return False
        index = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        return not self.stage.is_first if index is None else index not in self.here

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Tensors that checkpoints may have in place of those in `destinations`."""
        return {}

    @property
    def _parts(self) -> Sequence[Loadable]:
        classifier = () if self.classifier is None else (self.classifier,)
        return (*self._edges, *self.layers, self.norm, *classifier)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish_layer(self, index: int) -> None:
        """Before finish(): all that the layer at this place of `layers` needs is there."""
        self.layers[index].finish()
        self._finished.add(index)

    def finish(self) -> None:
        done = [self.layers[index] for index in self._finished]
        for part in self._parts:
            if part not in done:
                part.finish()

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Where the residual stream begins: [num_tokens, hidden_size], which nothing else holds."""
        return self.embedding.embed_step(batch.token_ids)

    def keep_states(self, layers: tuple[int, ...]) -> None:
        """From now on forward() gives the inputs of these layers, too, in this order. Raises InvalidArgument where a
        model cannot."""
        if not self.stage.is_whole:
            text = "speculative_config: its drafts need what layers read, and here these lie in stages"
            raise InvalidArgument(text, field="speculative_config")
        self.kept_layers = layers
        self._defer_all_reduces()

    def _defer_all_reduces(self) -> None:
        """Defers sums of ranks. A stage before others passes on the residual stream, without a norm after its last
        layer."""
        last_norm = self.norm if self.stage.is_last else None
        defer_all_reduces(self.layers, last_norm, self.kept_layers, self._collectives)

    @property
    def hidden_width(self) -> int:
        """Of what forward() gives."""
        return self.config.hidden_size * (1 + len(self.kept_layers))

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """[num_samples, tokens of this rank] in the model's dtype; of `hidden` [num_samples, hidden_size or more].
        Ranks have equally many columns, of which the last may be padding, -inf. `adapted`: which rows have adapters
        that add to the output head, if there are such."""
        size = self.config.hidden_size
        logits = self.head(hidden if hidden.size(-1) == size else hidden[..., :size].contiguous(), *adapted)
        cap = self._logit_cap
        return self.head.pad_vocab(logits.div_(cap).tanh_().mul_(cap) if cap else logits)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, vocab_size], on all ranks, without adapters."""
        return self.head.all_gather_vocab(self.logits(hidden))


def head_layers(config: DecoderConfig) -> float:
    """How many layers weigh as much as the output head: by the elements that a step reads, all experts among them."""
    attention = config.head_dim * (2 * config.num_q_heads + 2 * config.num_kv_heads)
    experts = config.experts
    rows = config.intermediate_size if experts is None else experts.num_experts * experts.intermediate_size
    return config.vocab_size / (attention + 3 * rows)
