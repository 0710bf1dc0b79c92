"""Aligns text with sound by the cross attention of the heads that follow the speech (Whisper, arXiv 2212.04356).

The queries of these heads are kept while the tokens of an aligned sequence are computed, in one step or several. With
its last token, their attention becomes one row of numbers per token; the frontend finds the path through them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.heads.pooled_step import PooledStep
from quire.services.worker.layers.attention.cross_attention import CrossAttention
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

FILE, FIELD = "generation_config.json", "alignment_heads"
MEDIAN_WIDTH = 7  # of transformers' WhisperConfig, where config.json has no median_filter_width
LEAST_DEVIATION = 1e-10  # of a row's attention over the tokens: a single token has none

Heads = Mapping[int, tuple[int, ...]]  # by layer, ascending
Keys = Callable[[int, int, int], Tensor]  # of a layer, a slot and a number of rows: [num_rows, num_kv_heads, head_dim]


@runtime_checkable
class AlignedModel(Protocol):
    """Model whose decoder has cross attention that follows the speech."""

    @property
    def cross_layers(self) -> Sequence[CrossAttention]:
        """Cross attention of each layer."""


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """Heads whose cross attention follows the speech, and the filter that smooths it."""

    heads: Heads
    median_width: int = MEDIAN_WIDTH

    @property
    def num_heads(self) -> int:
        return sum(map(len, self.heads.values()))

    @classmethod
    def of_folder(cls, folder: Path, num_layers: int, num_heads: int) -> AlignmentSettings:
        """Reads alignment_heads of generation_config.json; without it, all heads of the upper half of the layers are
        taken. Raises InvalidArgument for values that are not pairs of a layer and a head of the model."""
        width = read_config(folder).get("median_filter_width", MEDIAN_WIDTH)
        if not isinstance(width, int) or width < 1 or width % 2 == 0:
            text = f"model: config.json: median_filter_width must be an odd number, got {width!r:.40}; leave it out"
            raise InvalidArgument(text, field="model")
        pairs = _pairs(folder, num_layers, num_heads)
        if not pairs:
            pairs = [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads)]
        layers = sorted({layer for layer, _ in pairs})
        return cls({layer: tuple(head for at, head in pairs if at == layer) for layer in layers}, width)


def _pairs(folder: Path, num_layers: int, num_heads: int) -> list[tuple[int, int]]:
    """Returns the pairs of layer and head that generation_config.json lists; none without the file or the list. Raises
    InvalidArgument for others than the model has."""
    path = folder / FILE
    try:
        values: Any = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None
    given = (values.get(FIELD) if isinstance(values, dict) else None) or []
    sizes = (num_layers, num_heads)
    for pair in given if isinstance(given, list) else [given]:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not is_pair or not all(0 <= number < size for number, size in zip(pair, sizes, strict=True)):
            text = f"{FILE}: {FIELD} has {str(pair)[:40]}, and the model has {num_layers} layers of {num_heads} heads"
            raise InvalidArgument(f"model: {text}; correct it or leave it out", field="model")
    return [(layer, head) for layer, head in given]


@dataclass(frozen=True, slots=True)
class AlignmentSpec:
    """Alignment that a slot asks for."""

    first_position: int
    num_rows: int
    num_tokens: int  # of the whole sequence


class AlignmentHead:
    """Head that reports to which rows of the encoder's output the tokens of a sequence attend."""

    parameters = frozenset({"alignment"})

    def __init__(self, settings: AlignmentSettings, cross_layers: Sequence[CrossAttention], keys: Keys) -> None:
        self._settings, self._cross, self._keys = settings, cross_layers, keys
        self.specs: dict[int, AlignmentSpec] = {}
        self._queries: dict[int, list[list[Tensor]]] = {}  # by slot: of each step, of each layer with heads

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores what the slot asks for. Raises InvalidArgument for a range without tokens or rows, and for tokens that
        are cached and not computed."""
        asked = admission.alignment
        if asked is None:
            return
        num_tokens = len(admission.token_ids) // columns.NUMBER_BYTES
        if not admission.num_cached_tokens <= asked.first_position < num_tokens or not asked.num_rows:
            text = (
                f"alignment: tokens from {asked.first_position} on of {num_tokens}, {admission.num_cached_tokens} of "
                f"them cached, and {asked.num_rows} rows; at least one of each must be computed"
            )
            raise InvalidArgument(text, field="alignment")
        self.specs[slot] = AlignmentSpec(asked.first_position, asked.num_rows, num_tokens)
        self._queries[slot] = []
        self._keep_queries(True)

    def release(self, slot: int) -> None:
        self.specs.pop(slot, None)
        self._queries.pop(slot, None)
        self._keep_queries(bool(self.specs))

    def _keep_queries(self, keeps: bool) -> None:
        for layer in self._settings.heads:
            self._cross[layer].keep_queries(keeps)

    def rows(self, inputs: StepInputs) -> AlignmentRows | None:
        """Returns the rows of aligned sequences that this step computes; None if there are none."""
        found = [(row, slot) for row, slot in enumerate(inputs.slots.tolist()) if slot in self.specs]
        return AlignmentRows(self, inputs, found) if found else None

    def take(self, inputs: StepInputs, row: int, slot: int) -> Tensor | None:
        """Keeps the queries of the slot's tokens in this step; returns its alignment, float32 [num_tokens, num_rows],
        if the last token is among them."""
        spec = self.specs[slot]
        start, end = (int(at) for at in inputs.query_start[row : row + 2])
        start += max(0, spec.first_position - int(inputs.positions[start]))
        if start < end:
            self._queries[slot].append(
                [self._cross[layer].queries[start:end, list(heads)] for layer, heads in self._settings.heads.items()]
            )
        if int(inputs.seq_lens[row]) < spec.num_tokens:
            return None
        assert inputs.num_attended is not None, "the model has cross attention"
        return self._alignment(slot, int(inputs.num_attended[end - 1]))

    def _alignment(self, slot: int, num_attended: int) -> Tensor:
        """Computes the alignment of a slot whose queries are complete, one head after the other, so that little memory
        is needed."""
        num_rows, total = min(self.specs[slot].num_rows, num_attended), None
        by_layer = zip(*self._queries[slot], strict=True)
        for (layer, heads), queries in zip(self._settings.heads.items(), by_layer, strict=True):
            whole, keys = torch.cat(queries).float(), self._keys(layer, slot, num_attended).float()
            scale = self._cross[layer].scale
            for index, head in enumerate(heads):
                shared = keys[:, head * keys.size(1) // self._cross[layer].num_heads]
                weights = (whole[:, index] @ shared.t() * scale).softmax(dim=1)[:, :num_rows]
                smoothed = median_filter(standardized(weights), self._settings.median_width)
                total = smoothed if total is None else total.add_(smoothed)
        assert total is not None, "there are heads"
        return total / self._settings.num_heads


@dataclass(frozen=True, slots=True)
class AlignmentRows:
    """Aligned sequences of a step, as pairs of row and slot."""

    _head: AlignmentHead
    _inputs: StepInputs
    _found: list[tuple[int, int]]

    @property
    def tokens(self) -> I32:
        """Indices of each row's last token: the head reads queries, and a step needs a hidden state."""
        return self._inputs.query_start[[row + 1 for row, _ in self._found]] - np.int32(1)

    def launch(self, hidden: Tensor) -> PooledStep:
        """Aligns the sequences whose last token the step has computed."""
        step = PooledStep()
        for row, slot in self._found:
            aligned = self._head.take(self._inputs, row, slot)
            if aligned is not None:
                step.add([slot], [aligned.numel()], aligned)
        return step


def standardized(weights: Tensor) -> Tensor:
    """Returns `weights` [num_tokens, num_rows] with mean 0 and deviation 1 over the tokens."""
    deviation = weights.std(dim=0, keepdim=True, unbiased=False).clamp(min=LEAST_DEVIATION)
    return (weights - weights.mean(dim=0, keepdim=True)) / deviation


def median_filter(values: Tensor, width: int) -> Tensor:
    """Returns the medians of `width` neighbours along the last dimension of `values` [num_tokens, num_rows], mirrored
    at both ends; unchanged if there are too few."""
    margin = width // 2
    if values.size(1) <= margin:
        return values
    mirrored = torch.nn.functional.pad(values[None], (margin, margin), mode="reflect")[0]
    return mirrored.unfold(1, width, 1).median(dim=-1).values
