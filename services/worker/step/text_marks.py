"""Per-token inputs of encoders beyond token ids: token types (two texts) and tokens hidden from the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import InvalidArgument


class TextMarks:
    """Holds by slot where the second text starts and how many tokens are visible."""

    def __init__(self, num_types: int) -> None:
        """Creates an empty table; `num_types` is the number of token types the model knows."""
        self._num_types = num_types
        self._second_from: dict[int, int] = {}
        self._num_seen: dict[int, int] = {}

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the slot's marks, if it has some. Raises InvalidArgument for a second text if the model has one token
        type."""
        if admission.num_seen_tokens:
            self._num_seen[slot] = admission.num_seen_tokens
        if not admission.second_text_from:
            return
        if self._num_types < 2:
            raise InvalidArgument("second_text_from: this model has no token types for a second text", field="params")
        self._second_from[slot] = admission.second_text_from

    def release(self, slot: int) -> None:
        self._second_from.pop(slot, None)
        self._num_seen.pop(slot, None)

    def types(self, inputs: StepInputs, device: torch.device) -> Tensor | None:
        """Returns the token types, int32 [num_tokens]; None if all tokens are of the first text."""
        if not self._second_from:
            return None
        second_from = [self._second_from.get(slot, inputs.num_tokens) for slot in inputs.slots.tolist()]
        per_token = np.repeat(np.array(second_from, dtype=np.int32), np.diff(inputs.query_start))
        return upload((inputs.positions >= per_token).astype(np.int32), device)

    def num_seen(self, inputs: StepInputs, device: torch.device) -> Tensor | None:
        """Returns the number of visible leading tokens of each row, int32 [num_rows], at most its length; None if no
        slot has a limit."""
        if not self._num_seen:
            return None
        lengths = np.diff(inputs.query_start).tolist()
        slots = inputs.slots.tolist()
        seen = [min(self._num_seen.get(slot, most), most) for slot, most in zip(slots, lengths, strict=True)]
        return upload(np.array(seen, dtype=np.int32), device)
