"""Adapters of layers with a row per token of the vocabulary: embeddings and output heads.

Besides low-rank additions such a layer supports weights that were trained whole (PEFT's modules_to_save), which replace
the model's own for the rows of their adapter. For the kernels this is an addition of full rank, with the identity as
one of its matrices, to outputs multiplied by 0. So it works in recordings, on sharded ranks and in batches of several
adapters like low ranks, whatever the storage format of the model's own weight.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from quire.services.worker.lora.linear_adapters import LayerShape, LinearAdapters
from quire.services.worker.lora.peft.peft_folder import LowRank, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal


class VocabularyAdapters(LinearAdapters):
    """Adapters of a layer with a row per token, which may also replace its weight whole; it has one projection."""

    @staticmethod
    @abstractmethod
    def hidden_size(shape: LayerShape) -> int:
        """Returns the rank of an addition that replaces the whole weight."""

    @staticmethod
    @abstractmethod
    def _as_pair(weight: Tensor) -> LowRank:
        """Returns a whole weight [vocab_size, hidden_size] as an addition of full rank."""

    @property
    def whole_bytes(self) -> int:
        """Device memory of this rank for one adapter that replaces the layer; 0 if none may."""
        if not self._capacity.takes_whole:
            return 0
        return self.hidden_size(self.shape) * (len(self.shape.columns) + sum(self.shape.sizes)) * self._dtype.itemsize

    def check(self, folder: PeftFolder) -> None:
        """Raises InvalidArgument for an adapter that does not fit, or that replaces the weight with another shape or
        without reserved memory."""
        super().check(folder)
        name = self.shape.parts[0].name
        weight = folder.saved.get(name)
        if weight is None:
            return
        expected, actual = list(self._weight[0]), list(weight.shape)
        count = self._capacity.num_adapters
        reason = (
            f"has {actual[0]} tokens, the model's has {expected[0]}: added tokens are not served"
            if actual[1:] == expected[1:] and actual[0] > expected[0]
            else f"has shape {actual}, the model's has {expected}"
            if actual != expected
            else f"takes {weight.numel() * self._dtype.itemsize:,} bytes for each of {count} adapters (max_loras), "
            "which are reserved if lora_modules_to_save names it"
            if not self._capacity.takes_whole
            else ""
        )
        if reason:
            raise refusal(folder.name, f"modules_to_save: {name} {reason}")

    def _pairs(self, folder: PeftFolder) -> list[LowRank | None]:
        """Returns the low-rank addition, or the replaced weight as an addition of full rank."""
        weight = folder.saved.get(self.shape.parts[0].name)
        return super()._pairs(folder) if weight is None else [self._as_pair(weight)]


class HeadAdapters(VocabularyAdapters):
    """Adapters of an output head: a linear layer with an output per token."""

    @staticmethod
    def hidden_size(shape: LayerShape) -> int:
        return shape.in_features

    @staticmethod
    def _as_pair(weight: Tensor) -> LowRank:
        """Returns a whole output head as an addition: the identity, then the weight."""
        return LowRank(torch.eye(weight.size(1), dtype=weight.dtype), weight, replaces=True)


class EmbeddingAdapters(VocabularyAdapters):
    """Adapters of an embedding, treated as a linear layer whose inputs are one-hot vectors."""

    @staticmethod
    def hidden_size(shape: LayerShape) -> int:
        return shape.parts[0].out_features

    @staticmethod
    def _as_pair(weight: Tensor) -> LowRank:
        """Returns a whole embedding as an addition: its transposed table, then the identity."""
        return LowRank(weight.t(), torch.eye(weight.size(1), dtype=weight.dtype), replaces=True)

    def add(self, ids: Tensor, result: Tensor) -> None:
        """Adds to `result` [num_tokens, hidden_size], in place, the adapters' rows of the token ids `ids` [num_tokens],
        as this rank numbers them; does nothing if no row has an adapter."""
        if self._step.is_active:
            self._ops.embed_low_rank(ids, result, self.packed, self.rows)

    def _products_of_base(self, x: Tensor) -> Tensor:
        return self._product((x / self._factors).to(self._dtype))

    @property
    def _weight(self) -> tuple[tuple[int, int], range]:
        return (self.shape.in_features, self.shape.parts[0].out_features), self.shape.columns
