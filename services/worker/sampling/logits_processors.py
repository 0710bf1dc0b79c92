"""logits_processors: what installed packages do to the logits of requests that name them.

A package declares its own by the entry point group `quire.logits_processors`; an example is in tests/plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Bound, Positions
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import plugins, strict_json
from quire.shared.errors import InvalidArgument, QuireError

GROUP = "quire.logits_processors"
FIELD = "logits_processors"

Arguments = Mapping[str, Any]


class LogitsProcessor(Protocol):
    """A component of the sampler that is told only of sequences which ask for it, and with which arguments."""

    def admit(self, slot: int, arguments: Arguments, admission: SlotAdmission) -> None:
        """Takes note of a new sequence. Whatever it raises ends that sequence as an invalid argument."""

    def release(self, slot: int) -> None:
        """Forgets the slot, which may never have used it."""

    def bind(self, slots: Rows) -> Bound | None:
        """For a step that samples `slots` [num_rows], ascending, one for each row; None if none of them uses it."""


MakeProcessor = Callable[[int, int, torch.device], LogitsProcessor]  # of max_num_seqs, vocab_size, device


def installed_processors() -> dict[str, MakeProcessor]:
    """All that there are, imported, by name."""
    return {name: plugins.load(reference) for name, reference in plugins.known(GROUP, {}).items()}


class LogitsProcessors:
    """All installed ones as one feature, in the order of their names."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], vocabulary: Vocabulary, device: torch.device) -> None:
        self._processors = dict(sorted(processors.items()))
        self._vocabulary, self._device = vocabulary, device
        self._slots: set[int] = set()  # that name any

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        if admission.sampling.logits_processors:
            self._slots.add(slot)
        for name, written in sorted(admission.sampling.logits_processors.items()):
            processor = self._processors.get(name)
            if processor is None:
                there = ", ".join(self._processors) or "none"
                raise InvalidArgument(
                    f"{FIELD}: {name!r} does not exist on this worker; there are {there}", field=FIELD
                )
            try:
                processor.admit(slot, strict_json.read(written or "{}"), admission)
            except QuireError:
                raise
            except Exception as error:
                raise InvalidArgument(f"{FIELD}: {name}: {type(error).__name__}: {error}", field=FIELD) from error

    def release(self, slot: int) -> None:
        self._slots.discard(slot)
        for processor in self._processors.values():
            processor.release(slot)

    def bind(self, slots: Rows) -> BoundProcessors | BoundToGatheredRows | None:
        if self._vocabulary.shard.is_whole:
            bound = self._bound(slots)
            return BoundProcessors(bound) if bound else None
        if self._slots.isdisjoint(slots.tolist()):
            return None
        rows = np.flatnonzero([slot in self._slots for slot in slots.tolist()])
        bound = self._bound(slots[rows])
        return BoundToGatheredRows(BoundProcessors(bound), self._vocabulary, rows, self._device) if bound else None

    def _bound(self, slots: Rows) -> list[Bound]:
        return [one for processor in self._processors.values() if (one := processor.bind(slots)) is not None]


class BoundProcessors:
    """Those that rows of the step ask for."""

    def __init__(self, bound: list[Bound]) -> None:
        self._bound = bound

    def apply(self, logits: Tensor, positions: Positions) -> None:
        for one in self._bound:
            one.apply(logits, positions)

    def sampled(self, token_ids: Tensor) -> None:
        for one in self._bound:
            one.sampled(token_ids)


class BoundToGatheredRows:
    """What they do to the logits of all tokens, of the rows that ask for them."""

    def __init__(self, bound: BoundProcessors, vocabulary: Vocabulary, rows: Rows, device: torch.device) -> None:
        self._bound, self._vocabulary = bound, vocabulary
        self._host_rows, self._rows = rows, upload(rows, device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        whole = self._vocabulary.all_gather(logits[self._rows])
        self._bound.apply(whole, positions.select(self._host_rows, self._rows))
        logits[self._rows] = self._vocabulary.local_logits(whole)

    def sampled(self, token_ids: Tensor) -> None:
        self._bound.sampled(token_ids[self._rows])
