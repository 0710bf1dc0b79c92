"""What the sampler asks of a feature."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.step_value import step_value


@step_value
class Positions:
    """Where the tokens to be sampled will stand in their sequences, [num_rows].

    A slot may have several consecutive rows: one for its next token, and one behind each of its draft tokens.
    """

    host: I32  # not above the true ones, which only the device knows while accepted drafts are not counted
    device: Tensor
    drafts: Tensor | None = None  # int32 [num_rows, most] the row's drafts, in order, then -1; None: there are none

    def select(self, rows: Rows, on_device: Tensor) -> Positions:
        """Of some of the rows, which are there twice."""
        drafts = None if self.drafts is None else self.drafts[on_device]
        return Positions(self.host[rows], self.device[on_device], drafts)


class Bound(Protocol):
    """A feature prepared for the rows of a step; used again as long as the rows stay the same."""

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Changes float32 `logits` [num_rows, shard.size] in place, those of the tokens that are here."""

    def sampled(self, token_ids: Tensor) -> None:
        """These are the rows' new tokens, int32 [num_rows], on the device; -1 where a row gave none: the choice failed
        or a draft before it was refused."""


class SlotState(Protocol):
    """What a feature knows of slots."""

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Takes note of a new sequence. Raises InvalidArgument for what it cannot do."""

    def release(self, slot: int) -> None:
        """Forgets the slot, which may never have used it."""


class Component(SlotState, Protocol):
    """One way of changing logits. A slot that does not use it costs nothing."""

    def bind(self, slots: Rows) -> Bound | None:
        """For a step that samples `slots` [num_rows], ascending, one for each row; None if none of them uses it."""


def rows_by_slot(rows: Rows, slots: Rows) -> tuple[Rows, Rows]:
    """The different slots among `slots`, ascending, and for each the `rows` that are its own, [num_slots, most], -1
    behind them."""
    found, firsts, counts = np.unique(slots, return_index=True, return_counts=True)
    within = np.arange(counts.max(initial=0))
    at = firsts[:, None] + within
    return found, np.where(within < counts[:, None], rows[np.minimum(at, len(rows) - 1)], -1)


def check_token_ids(ids: I32, vocab_size: int, field: str) -> None:
    """An id outside of the vocabulary would be an access outside of a tensor."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidArgument(
            f"{field}: token id {wrong[0]} is not below the vocabulary size, {vocab_size}", field=field
        )
