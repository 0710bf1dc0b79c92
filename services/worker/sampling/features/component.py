"""Interfaces between the sampler and its features."""

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
    """Positions in their sequences of the tokens to be sampled, [num_rows].

    A slot may have several consecutive rows: one for its next token, and one after each of its draft tokens.
    """

    host: I32  # lower bounds: the device alone knows the exact ones until accepted drafts are counted
    device: Tensor
    drafts: Tensor | None = None  # int32 [num_rows, max_drafts] preceding drafts in order, then -1; None: no drafts

    def select(self, rows: Rows, on_device: Tensor) -> Positions:
        """Returns the positions of some rows; `rows` and `on_device` are the same indices on both sides."""
        drafts = None if self.drafts is None else self.drafts[on_device]
        return Positions(self.host[rows], self.device[on_device], drafts)


class Bound(Protocol):
    """Feature prepared for the rows of a step; reused in later steps while the rows stay the same sequences, so that it
    must not keep values of one step."""

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Changes `logits`, float32 [num_rows, shard.size], in place."""

    def sampled(self, token_ids: Tensor) -> None:
        """Receives the rows' new tokens, int32 [num_rows] on the device; -1 where a row has none because no token could
        be chosen or an earlier draft was refused."""


class SlotState(Protocol):
    """State of a component by slot, stored on admission and dropped on release."""

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores what the new sequence of `slot` asks for. Raises InvalidArgument for unsupported parameters."""

    def release(self, slot: int) -> None:
        """Drops the state of `slot`, which may hold none."""


class ParameterState(SlotState, Protocol):
    """State by slot of sequences that set certain parameters; admit() and release() are called for no others."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of these parameters (SlotAdmission.parameters); one of them suffices."""


class Component(ParameterState, Protocol):
    """Sampling feature that changes logits: it is bound to the rows of a step once, then applied in every step with the
    same rows. Slots that do not use it cost nothing."""

    def bind(self, slots: Rows) -> Bound | None:
        """Prepares a step that samples `slots` [num_rows], ascending, one per row, one of which sets a parameter of the
        feature; returns None if none of them uses it."""


def rows_by_slot(rows: Rows, slots: Rows) -> tuple[Rows, Rows]:
    """Groups `rows` by the slots that they belong to; `slots`: ascending, one per row. Returns the distinct slots,
    ascending, and the rows of each, [num_slots, max_rows_of_a_slot], padded with -1."""
    distinct, firsts, counts = np.unique(slots, return_index=True, return_counts=True)
    within = np.arange(counts.max(initial=0))
    indices = firsts[:, None] + within
    return distinct, np.where(within < counts[:, None], rows[np.minimum(indices, len(rows) - 1)], -1)


def check_token_ids(ids: I32, vocab_size: int, field: str) -> None:
    """Raises InvalidArgument naming `field` if an id is outside of [0, vocab_size); such an id would index outside of a
    tensor."""
    invalid = ids[(ids < 0) | (ids >= vocab_size)]
    if len(invalid):
        raise InvalidArgument(
            f"{field}: token id {invalid[0]} is not below the vocabulary size, {vocab_size}", field=field
        )
