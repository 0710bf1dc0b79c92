"""logits_processors: lets installed packages change the logits of requests that name them.

A package declares processors with the entry point group `quire.logits_processors`; tests/plugins has an example.
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
    """A sampling component of another package that sees only the sequences that name it, with their arguments."""

    def admit(self, slot: int, arguments: Arguments, admission: SlotAdmission) -> None:
        """Stores what a new sequence asks for. Any exception ends the sequence with an InvalidArgument error."""

    def release(self, slot: int) -> None:
        """Drops the state of `slot`, which may hold none."""

    def bind(self, slots: Rows) -> Bound | None:
        """Prepares a step that samples `slots` [num_rows], ascending, one per row; returns None if none of them uses
        it."""


MakeProcessor = Callable[[int, int, torch.device], LogitsProcessor]  # (max_num_seqs, vocab_size, device)


def installed_processors() -> dict[str, MakeProcessor]:
    """Imports all installed processors of the entry point group and returns their factories by name; none installed:
    empty."""
    return {name: plugins.load(reference) for name, reference in plugins.known(GROUP, {}).items()}


class LogitsProcessors:
    """Sampling feature that runs all installed processors, in the order of their names."""

    parameters = frozenset({"logits_processors"})

    def __init__(self, processors: Mapping[str, LogitsProcessor], vocabulary: Vocabulary, device: torch.device) -> None:
        self._processors = dict(sorted(processors.items()))
        self._vocabulary, self._device = vocabulary, device
        self._slots: set[int] = set()  # slots that name a processor

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Parses the JSON arguments of every processor that the sequence names and admits it there. Raises
        InvalidArgument for an unknown name, invalid JSON, or any exception of a processor."""
        if admission.sampling.logits_processors:
            self._slots.add(slot)
        for name, written in sorted(admission.sampling.logits_processors.items()):
            processor = self._processors.get(name)
            if processor is None:
                available = ", ".join(self._processors) or "none"
                raise InvalidArgument(
                    f"{FIELD}: {name!r} does not exist on this worker; available: {available}", field=FIELD
                )
            try:
                processor.admit(slot, strict_json.read(written or "{}"), admission)
            except QuireError:
                raise
            except Exception as error:
                raise InvalidArgument(f"{FIELD}: {name}: {type(error).__name__}: {error}", field=FIELD) from error

    def release(self, slot: int) -> None:
        """Releases the slot in every processor, whether or not its sequence named it."""
        self._slots.discard(slot)
        for processor in self._processors.values():
            processor.release(slot)

    def bind(self, slots: Rows) -> BoundProcessors | BoundToGatheredRows | None:
        """Binds the processors that rows of the step use; None if there are none. With a sharded vocabulary only the
        rows that name a processor are gathered and shown to it."""
        if self._vocabulary.shard.is_whole:
            bound = self._bound(slots)
            return BoundProcessors(bound) if bound else None
        if self._slots.isdisjoint(slots.tolist()):
            return None
        rows = np.flatnonzero([slot in self._slots for slot in slots.tolist()])
        bound = self._bound(slots[rows])
        return BoundToGatheredRows(BoundProcessors(bound), self._vocabulary, rows, self._device) if bound else None

    def _bound(self, slots: Rows) -> list[Bound]:
        """Binds every processor to `slots`; leaves out those that none of them uses."""
        return [one for processor in self._processors.values() if (one := processor.bind(slots)) is not None]


class BoundProcessors:
    """Processors bound to the rows of a step, applied in the order of their names."""

    def __init__(self, bound: list[Bound]) -> None:
        self._bound = bound

    def apply(self, logits: Tensor, positions: Positions) -> None:
        for one in self._bound:
            one.apply(logits, positions)

    def sampled(self, token_ids: Tensor) -> None:
        for one in self._bound:
            one.sampled(token_ids)


class BoundToGatheredRows:
    """Applies processors to logits of the whole vocabulary, gathered from all ranks for the rows that name one."""

    def __init__(self, bound: BoundProcessors, vocabulary: Vocabulary, rows: Rows, device: torch.device) -> None:
        self._bound, self._vocabulary = bound, vocabulary
        self._host_rows, self._rows = rows, upload(rows, device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Gathers the whole rows from all ranks, runs the processors on them, and writes this rank's shard back to
        `logits`; every rank does the same."""
        whole = self._vocabulary.all_gather(logits[self._rows])
        self._bound.apply(whole, positions.select(self._host_rows, self._rows))
        logits[self._rows] = self._vocabulary.local_logits(whole)

    def sampled(self, token_ids: Tensor) -> None:
        self._bound.sampled(token_ids[self._rows])
