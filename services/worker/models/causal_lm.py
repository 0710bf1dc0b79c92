"""Base of decoder-only language models: an embedding, layers on a residual stream, a norm, an output head.

A family is a class in its own file, found by `registry`. It reads its config.json and builds its layers; the rest of
the worker uses the interface of CausalLM and never a layer's internals. Fast paths are in separate modules:
layer_stack.py, single_row.py, taped.py, deferred_all_reduce.py. A family offers them by `single_row` and
`taped_functions`; a subclass that changes the computation around the layers does not inherit them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.rotary import column_axes, cos_sin_table, rows_by_axes
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

if TYPE_CHECKING:  # this module is also imported without torch, to check a config.json
    from torch import Tensor

    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable

TIED_HEAD = "lm_head.weight"


class CausalLM(ABC):
    """Decoder-only language model: tokens to hidden states to logits."""

    # Functions of `kernels` called by forward(), so that a tape can record it; empty: not recordable.
    taped_functions: ClassVar[tuple[str, ...]] = ()
    embedding_name: ClassVar[str] = "model.embed_tokens"
    norm_name: ClassVar[str] = "model.norm"
    records_decodes: ClassVar[bool] = True  # decode steps may be part of a CUDA graph
    scales_media: ClassVar[bool] = False  # the scale of token embeddings applies to rows of encoders, too

    classifier: Classifier | None = None

    # Only on the first pipeline stage.
    embedding: Embedding
    head: OutputHead | TiedOutputHead

    # Token counts of experts, int64 [layers with experts, num_experts], and the indices of these layers.
    expert_counts: tuple[Tensor, tuple[int, ...]] | None = None

    # Layers whose inputs are appended to the hidden states for a drafter (keep_states).
    kept_layers: tuple[int, ...] = ()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the hidden states [num_samples, hidden_width] of the tokens whose logits are wanted."""
        return joined(*self.run(batch, caches))

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> tuple[Tensor, list[State]]:
        """Returns the hidden states [num_samples, hidden_size] and the kept layer inputs."""
        residual = self.embed(batch)
        stack, batch = self._rotating(batch)
        if self.kept_layers:
            return stack.normed_and_kept(self.kept_layers, residual, batch, caches)
        return stack.normed(residual, batch, caches), []

    def _rotating(self, batch: ForwardBatch) -> tuple[LayerStack, ForwardBatch]:
        """Returns the layers and the batch such that tokens of pictures are rotated by their positions on each axis:
        with a rotary table that has a row for each token of the step. Steps without pictures stay as they are."""
        if batch.axes is None or self._column_axes is None:
            return self._stack, batch
        import torch

        rows = rows_by_axes(self.cos_sin, batch.axes, self._column_axes)
        numbers = torch.arange(rows.size(0), dtype=torch.int32, device=rows.device)
        return self._stack.rotated_by(rows), batch.with_positions(numbers)

    def first_layers(self, residual: Tensor, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the residual stream [num_tokens, hidden_size] after this stage's layers, for the next stage; may
        change `residual`."""
        return residual.add_(self._stack.through(residual, batch, caches))

    def last_layers(self, residual: Tensor, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Runs this stage's layers and the final norm; returns the hidden states, as forward(). May change `residual`,
        the previous stage's output."""
        return self._stack.normed(residual, batch, caches)

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        """Builds the layers of this pipeline stage without weights; embedding and output head only on the first stage.

        `num_positions`: length of the rotary tables, the longest sequence that will be run.
        """
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
        of_columns = column_axes(config.rope, config.rope_dim)
        self._column_axes: Tensor | None = None if of_columns is None else of_columns.to(place.device)
        ropes = config.ropes or (config.rope,) * config.num_layers
        self._collectives = place.shard.collectives
        self._defer_all_reduces()
        self._finished: set[int] = set()  # indices of finished layers, while weights are loaded
        rotations = [tables[ropes[index]] for index in self.here]
        self._stack = LayerStack(self.layers, rotations, self.norm, place.ops.embed)

    @classmethod
    def final_norm(cls, config: DecoderConfig, place: LayerPlacement) -> Norm:
        """Returns the norm after the last layer, which includes the scale of the logits.

        The scale cannot be part of a tied output head, because its table is the embedding.
        """
        tied = config.scales.embedding if config.tie_word_embeddings else 1.0
        scale, offset = config.scales.logit / tied, config.scales.norm_offset
        return RMSNorm(cls.norm_name, config.hidden_size, config.rms_norm_eps, place, offset=offset, scale=scale)

    @staticmethod
    @abstractmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json. Raises InvalidArgument for features that are not supported. Needs no torch."""

    @staticmethod
    @abstractmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> DecoderLayer: ...

    @staticmethod
    def kv_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
        """Returns what each layer caches of earlier tokens: keys and values (all or a window), a latent vector, a
        recurrent state, or a pair of these."""
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
        """Returns the reason why decode steps of one token cannot run as fused kernels (single_row.py), or None if they
        can."""
        return "the family has no single-row program"

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore, because the model has them under another name or not at all; a name
        that ends with "." is a prefix."""
        return (TIED_HEAD,) if self.config.tie_word_embeddings else ()

    def is_on_other_stage(self, name: str) -> bool:
        """Returns whether another pipeline stage has a checkpoint tensor that this one lacks."""
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
        """Finishes the layer at `index` of `layers` once its tensors are loaded, before finish()."""
        self.layers[index].finish()
        self._finished.add(index)

    def finish(self) -> None:
        """Finishes all parts after their tensors are loaded, except layers already finished by finish_layer()."""
        done = [self.layers[index] for index in self._finished]
        for part in self._parts:
            if part not in done:
                part.finish()

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the start of the residual stream, [num_tokens, hidden_size], in new memory that layers may change."""
        embedded = self.embedding.embed_step(batch.token_ids)
        return embedded if batch.media is None else batch.media.place(embedded)

    def keep_states(self, layers: tuple[int, ...]) -> None:
        """Makes forward() append the inputs of the layers at these indices to the hidden states, in this order, for a
        drafter.

        Widens `hidden_width`. Raises InvalidArgument if the layers are distributed over pipeline stages.
        """
        if not self.stage.is_whole:
            text = (
                "speculative_config: this method reads the inputs of layers, which pipeline stages distribute; "
                "use another method"
            )
            raise InvalidArgument(text, field="speculative_config")
        self.kept_layers = layers
        self._defer_all_reduces()

    def _defer_all_reduces(self) -> None:
        """Moves the all-reduce at the end of each layer into the next norm, where the collectives support it.

        A stage followed by others passes on the residual stream without a norm after its last layer.
        """
        last_norm = self.norm if self.stage.is_last else None
        defer_all_reduces(self.layers, last_norm, self.kept_layers, self._collectives)

    @property
    def hidden_width(self) -> int:
        """Width of the tensors returned by forward()."""
        return self.config.hidden_size * (1 + len(self.kept_layers))

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """Returns logits [num_samples, tokens of this rank] in the model's dtype, soft-capped if the model has a cap.

        `hidden` is [num_samples, hidden_size or more]. All ranks have equally many columns, the last ones may be
        padding (-inf). `adapted`: rows with adapters on the output head, if there are any.
        """
        size = self.config.hidden_size
        logits = self.head(hidden if hidden.size(-1) == size else hidden[..., :size].contiguous(), *adapted)
        cap = self._logit_cap
        return self.head.pad_vocab(logits.div_(cap).tanh_().mul_(cap) if cap else logits)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_samples, vocab_size], gathered from all ranks, on all ranks; without adapters."""
        return self.head.all_gather_vocab(self.logits(hidden))


def head_layers(config: DecoderConfig) -> float:
    """Returns the weight of the output head in units of layers, by elements read per step, including all experts.

    Used to balance pipeline stages: the first one has the head.
    """
    attention = config.head_dim * (2 * config.num_q_heads + 2 * config.num_kv_heads)
    experts = config.experts
    rows = config.intermediate_size if experts is None else experts.num_experts * experts.intermediate_size
    return config.vocab_size / (attention + 3 * rows)
