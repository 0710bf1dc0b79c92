"""Base of encoder-only models: an embedding, layers that attend to whole prompts, and no output head.

A family is a class in its own file, as with decoders (causal_lm.py). No later step reads what a layer computes, so
there are no caches: a prompt is computed in one step (shared/kv/kv_specs.py: Nothing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from quire.services.worker.layers.attention.rotary import cos_sin_table
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.encoders.encoder_config import EncoderConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:  # this module is also imported without torch, to check a config.json
    from torch import Tensor

    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
    from quire.services.worker.layers.pooled_classifier import PooledClassifier


class EncoderLayer(Protocol):
    """Layer that maps the vectors of all tokens of a step to the next layer's input."""

    def destinations(self) -> Iterator[tuple[str, Destination]]: ...

    def finish(self) -> None: ...

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size], may be overwritten -> the same shape."""


class EncoderModel(ABC):
    """Encoder-only model: maps the tokens of whole prompts to hidden states, without KV caches and without
    generation."""

    base: ClassVar[str]  # prefix of the encoder in checkpoints with a head
    unused: ClassVar[tuple[str, ...]] = ()  # checkpoint tensors that are ignored
    pooling: ClassVar[str] = "cls"  # whose token's vector is the prompt's, unless the model's folder says otherwise

    def __init__(self, config: EncoderConfig, place: LayerPlacement, num_positions: int) -> None:
        """Builds the layers without weights, and a classifier if the configuration has classes.

        `num_positions`: length of the rotary tables, the longest prompt that will be run.
        """
        self.config = config
        self.layers = [self.layer(index, config, place) for index in range(config.num_layers)]
        self.classifier = self.classifier_of(config, place) if config.num_classes else None
        ropes = [config.rope(index) for index in range(config.num_layers)]
        tables = {rope: cos_sin_table(rope, config.head_dim, num_positions).to(place.device) for rope in {*ropes}}
        self._rotations = [tables[rope] for rope in ropes]

    @staticmethod
    @abstractmethod
    def read(config: ConfigFile) -> EncoderConfig:
        """Reads config.json. Raises InvalidArgument for features that are not supported. Needs no torch."""

    @staticmethod
    @abstractmethod
    def layer(index: int, config: EncoderConfig, place: LayerPlacement) -> EncoderLayer: ...

    @property
    @abstractmethod
    def parts(self) -> Sequence[Loadable]:
        """Modules with weights before and after the layers: embeddings and norms."""

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the input of the first layer, [num_tokens, hidden_size]."""

    def finalize(self, x: Tensor) -> Tensor:
        """Computes hidden states from the last layer's output for the wanted tokens; the default returns them
        unchanged."""
        return x

    @property
    def passed_over(self) -> tuple[str, ...]:
        return self.unused

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (*self.parts, *self.layers, *(() if self.classifier is None else (self.classifier,)))

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the hidden states [num_wanted, hidden_size] of batch.logit_tokens, or of all tokens; `caches` are not
        used."""
        x = self.embed(batch)
        for layer, cos_sin in zip(self.layers, self._rotations, strict=True):
            x = layer(x, batch, cos_sin)
        if batch.logit_tokens is not None:
            x = x.index_select(0, batch.logit_tokens)
        return self.finalize(x)

    @classmethod
    def classifier_of(cls, config: EncoderConfig, place: LayerPlacement) -> PooledClassifier:
        """Raises InvalidArgument: the family has no classifier. Families with one override it."""
        raise InvalidArgument("config.json: architectures: this family has no classifier", field="model")

    def logits(self, hidden: Tensor, *_: object) -> Tensor:
        """Returns zeros [num_rows, vocab_size], for slots that were rejected but are still part of a step: encoders do
        not generate."""
        return hidden.new_zeros(hidden.size(0), self.config.vocab_size)
