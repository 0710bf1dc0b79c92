"""Draws tokens from processed logits: temperature, filters and seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.columns import FILTERS, TOP_K, TOP_P, ChoiceColumns
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared.sampling_params import is_greedy

FEW_TOKENS = (
    256  # top_k up to here: one gather sends no more numbers than a search round (vocabulary/filter_thresholds.py)
)


class SlotChoice:
    """Temperature, filters and seed of every slot in host columns, [max_num_seqs]; a step uploads its rows when they
    change."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, few: int = FEW_TOKENS) -> None:
        """`few`: largest top_k for which ranks exchange candidates instead of searching a threshold; 0 if the bits of a
        row's result must not depend on the other rows of the step (batch-invariant mode)."""
        self._vocab_size, self._few = vocab_size, few
        self.device = device
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.filters = {one: np.full(num_slots, one.unused, dtype=one.dtype) for one in FILTERS}
        self.seed = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Reads the sampling parameters of a new sequence; a greedy one gets temperature 0 and no filters."""
        sampling = admission.sampling
        temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        greedy = is_greedy(temperature)
        self.temperature[slot] = 0.0 if greedy else temperature
        for one, values in self.filters.items():
            values[slot] = one.unused if greedy else one.requested(sampling)
        if not 0 < self.filters[TOP_K][slot] < self._vocab_size:
            self.filters[TOP_K][slot] = TOP_K.unused
        self.seed[slot] = sampling.seed

    def max_kept(self, slots: Rows) -> int:
        """Returns the upper bound of tokens that top_k leaves in any of these slots, 0 if a row with top_k or top_p may
        keep more than `few` (ChoiceColumns.max_kept)."""
        counts = self.filters[TOP_K][slots]
        have_many = (counts > self._few) | ((counts == 0) & (self.filters[TOP_P][slots] < 1))
        return 0 if have_many.any() else int(counts.max(initial=0))

    def bind(self, slots: Rows, vocabulary: Vocabulary) -> BoundChoice:
        """Uploads the columns of `slots` [num_rows] for logits of `vocabulary`; a copy, so that later admissions do not
        change it."""
        return BoundChoice(self, slots, vocabulary)


class BoundChoice:
    """Temperature, filters and seeds of some rows as columns [num_rows] on the device; a column is None if no row uses
    it."""

    def __init__(self, choice: SlotChoice, slots: Rows, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._device = choice.device
        self._columns = ChoiceColumns(
            self._column(choice.temperature[slots], unused=0),
            *(self._column(values[slots], one.unused) for one, values in choice.filters.items()),
            max_kept=choice.max_kept(slots),
        )
        self.seeds = upload(choice.seed[slots], self._device)

    def _column(self, values: npt.NDArray[Any], unused: float) -> Tensor | None:
        """Uploads `values` [num_rows]; returns None if every row has the value `unused`."""
        return None if (values == unused).all() else upload(values, self._device)

    def choose(self, logits: Tensor, positions: Positions, stream: int = 0) -> Tensor:
        """Samples one token per row: int32 [num_rows], -1 where no logit is finite.

        `stream`: added to the seeds, to draw noise that is independent of the tokens' own.
        """
        seeds = self.seeds + stream if stream else self.seeds
        return self._vocabulary.sample(logits, self._columns, seeds, positions.device)

    @property
    def temperature(self) -> Tensor | None:
        """float32 [num_rows], 0 for greedy rows; None if all are."""
        return self._columns.temperature

    def filtered(self, logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Returns the logits that `rows` (indices or a slice into `logits`) are drawn from: divided by temperature,
        -inf where a filter dropped a token. The given logits stay unchanged."""
        return self._vocabulary.filtered(logits[rows], self._columns.select(rows))

    @property
    def is_plain(self) -> bool:
        """True if no row has a filter: temperature and seed alone."""
        return not self._columns.have_filters


class PlainChoice:
    """Samples by temperature and seed alone, from buffers with fixed addresses, for CUDA graphs."""

    def __init__(self, vocabulary: Vocabulary, max_rows: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._temperature = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._loaded: BoundChoice | None = None

    def load(self, choice: BoundChoice, num_rows: int) -> None:
        """Copies the rows' temperatures and seeds into the buffers that the next graph replays read; does nothing if
        `choice` was the last one loaded. `choice` must have no filters."""
        assert choice.is_plain
        if choice is self._loaded:
            return
        self._loaded = choice
        self._seeds[:num_rows] = choice.seeds
        self._temperature[:num_rows] = 0.0 if choice.temperature is None else choice.temperature

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Samples one token per row: int32 [num_rows], -1 where no logit is finite."""
        rows = logits.size(0)
        return self._vocabulary.sample(logits, ChoiceColumns(self._temperature[:rows]), self._seeds[:rows], positions)
