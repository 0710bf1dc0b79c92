"""What adapters do to a layer that has a row for each token of the vocabulary: an embedding, an output head.

Besides additions of low rank such a layer takes weights that were trained whole (PEFT's modules_to_save), which stand
in the place of the model's own for the rows of their adapter. To the kernels that is an addition of full rank, one of
whose matrices is the identity, to outputs that were multiplied by 0: so what holds for low ranks in recordings, among
ranks and in batches of several adapters holds for it, and it does not matter what the model's own weight is stored as.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from quire.services.worker.lora.linear_adapters import LayerShape, LinearAdapters
from quire.services.worker.lora.peft.peft_folder import LowRank, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal


class VocabularyAdapters(LinearAdapters):
    """Of one projection."""

    @staticmethod
    @abstractmethod
    def hidden_size(shape: LayerShape) -> int:
        """The rank of an addition that is a whole weight."""

    @staticmethod
    @abstractmethod
    def _as_pair(weight: Tensor) -> LowRank:
        """Of a whole weight [vocab_size, hidden_size]."""

    @property
    def whole_bytes(self) -> int:
        """On this rank's device, for one adapter that has the layer whole; 0 where none may."""
        if not self._capacity.takes_whole:
            return 0
        return self.hidden_size(self.shape) * (len(self.shape.columns) + sum(self.shape.sizes)) * self._dtype.itemsize

    def check(self, folder: PeftFolder) -> None:
        super().check(folder)
        name = self.shape.parts[0].name
        weight = folder.saved.get(name)
        if weight is None:
            return
        want, have = list(self._weight[0]), list(weight.shape)
        count = self._capacity.num_adapters
        reason = (
            f"has {have[0]} tokens, the model's has {want[0]}: added tokens are not served"
            if have[1:] == want[1:] and have[0] > want[0]
            else f"has shape {have}, the model's has {want}"
            if have != want
            else f"takes {weight.numel() * self._dtype.itemsize:,} bytes for each of {count} adapters (max_loras), "
            "which are kept free where lora_modules_to_save names it"
            if not self._capacity.takes_whole
            else ""
        )
        if reason:
            raise refusal(folder.name, f"modules_to_save: {name} {reason}")

    def _pairs(self, folder: PeftFolder) -> list[LowRank | None]:
        weight = folder.saved.get(self.shape.parts[0].name)
        return super()._pairs(folder) if weight is None else [self._as_pair(weight)]


class HeadAdapters(VocabularyAdapters):
    """Of an output head."""

    @staticmethod
    def hidden_size(shape: LayerShape) -> int:
        return shape.in_features

    @staticmethod
    def _as_pair(weight: Tensor) -> LowRank:
        return LowRank(torch.eye(weight.size(1), dtype=weight.dtype), weight, replaces=True)


class EmbeddingAdapters(VocabularyAdapters):
    """Of an embedding: a linear layer whose inputs are 1 at one place and 0 elsewhere."""

    @staticmethod
    def hidden_size(shape: LayerShape) -> int:
        return shape.parts[0].out_features

    @staticmethod
    def _as_pair(weight: Tensor) -> LowRank:
        return LowRank(weight.t(), torch.eye(weight.size(1), dtype=weight.dtype), replaces=True)

    def add(self, ids: Tensor, result: Tensor) -> None:
        """To `result` [num_tokens, hidden_size], of `ids` [num_tokens], as this rank numbers them."""
        if self._step.is_active:
            self._ops.embed_low_rank(ids, result, self.packed, self.rows)

    def _products_of_base(self, x: Tensor) -> Tensor:
        return self._product((x / self._factors).to(self._dtype))

    @property
    def _weight(self) -> tuple[tuple[int, int], range]:
        return (self.shape.in_features, self.shape.parts[0].out_features), self.shape.columns
