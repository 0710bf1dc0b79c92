"""Merges an adapter into the weights that it was trained for: W + s B A, or DoRA's form of it, tensor by tensor.

Names and sizes are checked before anything is computed. An output head that is tied to the embeddings gets a weight of
its own if the adapter changes one of the two, since it leaves the other unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.services.worker.lora.base_copies import probes
from quire.services.worker.lora.peft.peft_folder import LowRank, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal

WEIGHT = ".weight"
TEXT_PREFIX = "language_model."  # of the text part's tensors in multimodal models of transformers 4
HEAD = "lm_head"
TABLES = ("embed_tokens", "wte", "embed_in")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # GPT-2's layers, whose weights are [in_features, out_features]


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Change of one weight by an adapter: a low-rank addition, or a replacement."""

    module: str
    pair: LowRank | None = None
    whole: Tensor | None = None
    transposed: bool = False  # the weight's rows are the addition's columns

    def changed(self, weight: Tensor) -> Tensor:
        """Returns the changed weight, float32 in the shape of `weight`, which stays unchanged; DoRA scales the rows of
        the sum to its magnitudes."""
        if self.whole is not None:
            return self.whole.float()
        assert self.pair is not None, "either pair or whole is set"
        base = weight.float()
        merged = (base.t() if self.transposed else base) + self.pair.up @ self.pair.down
        if self.pair.magnitude is not None:
            merged *= (self.pair.magnitude / torch.linalg.vector_norm(merged, dim=1))[:, None]
        return merged.t() if self.transposed else merged

    def shape(self) -> list[int]:
        """Returns the shape that the weight must have in the checkpoint."""
        if self.whole is not None:
            return list(self.whole.shape)
        assert self.pair is not None, "either pair or whole is set"
        shape = [self.pair.up.size(0), self.pair.down.size(1)]
        return shape[::-1] if self.transposed else shape


class AdapterMerge:
    """Merge of one adapter into one checkpoint, tensor by tensor; finds the tensor of each change, and checks its
    shape, when constructed."""

    def __init__(
        self, adapter: PeftFolder, shapes: Mapping[str, Sequence[int]], *, tied: bool | None, transposed: bool
    ) -> None:
        """`shapes`: of all tensors of the checkpoint, by name; `tied`: whether its config ties the output head to the
        embeddings, None if it does not tell; `transposed`: weights are those of GPT-2. Raises InvalidArgument for an
        adapter that does not fit the checkpoint."""
        self._adapter, self._shapes = adapter, shapes
        if adapter.stacks:
            text = f"{adapter.stacks[0].name}: merging adapters of stacked expert parameters is not supported"
            raise refusal(adapter.name, text)
        prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in shapes) else ""
        self._head = prefix + HEAD + WEIGHT
        self._tied = self._head not in shapes if tied is None else tied
        self._changes: dict[str, WeightChange] = {}  # by tensor
        self._of_head: WeightChange | None = None  # if the head is tied to the embeddings
        for change in self._all(transposed):
            self._place(change)
        changed = {change.module for change in self._changes.values()}
        changes_vocabulary = any(_ends(name, (*TABLES, HEAD)) for name in changed) or self._of_head is not None
        self._untied = self._table() if self._tied and changes_vocabulary else ""
        self.num_changed = len(self._changes) + (self._of_head is not None)

    @property
    def unties(self) -> bool:
        """Whether the merged output head has a weight of its own."""
        return bool(self._untied)

    def merge_tensor(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Returns the tensors that replace a tensor of the checkpoint, in its dtype: itself, none, or the embeddings
        and an output head of its own. Raises InvalidArgument if it is not a weight of 16 or 32 bits, or not the one
        that the adapter was trained for."""
        if self._untied and name == self._head:
            return {}  # a copy of the embeddings, from which the head is made
        merged = {name: self._changed(name, weight, self._changes.get(name))}
        if name == self._untied:
            merged[self._head] = self._changed(name, weight, self._of_head).clone()
        return merged

    def _changed(self, name: str, weight: Tensor, change: WeightChange | None) -> Tensor:
        """Returns `weight` with `change` applied, or as it is for None. Raises InvalidArgument for a weight of another
        type, or one that differs from the adapter's copy of it."""
        if change is None:
            return weight
        if weight.dtype not in FLOATS:
            text = f"{name} is of {weight.dtype}: adapters are merged into weights of 16 or 32 bits"
            raise refusal(self._adapter.name, text)
        copy = self._adapter.bases.get(change.module)
        if copy is not None:
            products = probes(weight.size(1)) @ weight.float().t()
            if copy.shape != tuple(weight.shape) or not copy.equals(products, range(weight.size(0))):
                text = f"{change.module}: the adapter's copy of this weight differs from the model's"
                raise refusal(self._adapter.name, text)
        return change.changed(weight).to(weight.dtype).contiguous()

    def _all(self, transposed: bool) -> list[WeightChange]:
        """Returns the changes of all modules of the adapter; embeddings, and with `transposed` GPT-2's layers, store
        their weights transposed."""
        adapter = self._adapter
        pairs = [
            WeightChange(
                module, pair, transposed=module in adapter.embeddings or (transposed and _ends(module, TRANSPOSED))
            )
            for module, pair in adapter.modules.items()
        ]
        return pairs + [WeightChange(module, whole=weight) for module, weight in adapter.saved.items()]

    def _place(self, change: WeightChange) -> None:
        """Assigns a change to its tensor, that of a tied output head to the embeddings' table. Raises InvalidArgument
        for an unknown module or another shape."""
        is_table = change.module == HEAD and self._tied
        name = self._table() if is_table else self._find(change.module)
        if list(self._shapes[name]) != change.shape():
            text = f"{change.module} is for a weight of shape {change.shape()}, {name} has {list(self._shapes[name])}"
            raise refusal(self._adapter.name, text)
        if is_table:
            self._of_head = change
        else:
            self._changes[name] = change

    def _find(self, module: str) -> str:
        """Returns the tensor name of a module; some checkpoints omit or add a prefix of the layers' names (GPT-2), and
        multimodal ones add that of their text part. Raises InvalidArgument if the checkpoint has none."""
        _, _, inside = module.partition(".")
        of_text = (f"{TEXT_PREFIX}{module}", f"model.{TEXT_PREFIX}{inside}")
        names = [name for name in (module, inside, f"model.{module}", *of_text) if name + WEIGHT in self._shapes]
        if not names:
            text = f"{module} is not a layer of this checkpoint, which has no {module}{WEIGHT}"
            raise refusal(self._adapter.name, text)
        return names[0] + WEIGHT

    def _table(self) -> str:
        """Returns the tensor name of the embeddings. Raises InvalidArgument unless the checkpoint has exactly one such
        tensor."""
        tables = [name for name in self._shapes if _ends(name.removesuffix(WEIGHT), TABLES)]
        if len(tables) != 1:
            text = f"the output head is tied to the embeddings, of which the checkpoint has {len(tables)}"
            raise refusal(self._adapter.name, text)
        return tables[0]


def _ends(module: str, names: Sequence[str]) -> bool:
    return module.rpartition(".")[2] in names
