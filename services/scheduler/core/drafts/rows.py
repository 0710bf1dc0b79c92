"""Results of a step in which sequences may have several tokens each, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.plan import I32, U32, LogprobColumns, Logprobs, StepResult, TokenColumns
from quire.services.scheduler.core.step.plan_builder import InFlightStep

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Sampled rows of a step in flight: the tokens, drafts and log-probabilities of each slot."""

    counts: U32  # [num_rows] tokens of each row
    token_ids: I32  # [sum(counts)] row by row
    assumed: I32  # [num_rows] drafts that the plan counted
    verified: U32  # [num_rows] drafts that the worker verified
    asks_logprobs: npt.NDArray[np.bool_]  # [num_rows] rows that asked for log-probabilities
    logprobs: Logprobs | None  # of the positions of the rows that asked

    @classmethod
    def from_result(cls, flight: InFlightStep, result: StepResult) -> DraftedRows:
        """Combines the columns of a planned step and its result; missing columns count as one token and no drafts
        for each row. Raises AssertionError if lengths do not match."""
        num_rows = len(flight.slots)
        counts = np.ones(num_rows, dtype=np.uint32) if result.token_counts is None else result.token_counts
        assumed = np.zeros(num_rows, dtype=np.int32) if flight.drafts is None else flight.drafts
        verified = np.zeros(num_rows, dtype=np.uint32) if result.draft_counts is None else result.draft_counts
        assert len(counts) == len(verified) == num_rows, "a count for each slot that may have sampled"
        assert len(result.token_ids) == counts.sum(), "as many tokens as the counts say"
        return cls(counts, result.token_ids, assumed, verified, flight.asks_logprobs, result.logprobs)

    @property
    def num_rejected(self) -> I32:
        """[num_rows] tokens that the plan counted and the worker did not return."""
        return self.assumed + 1 - self.counts.astype(np.int32)

    @property
    def all_single(self) -> bool:
        return bool((self.counts == 1).all())

    def select(self, rows: npt.NDArray[np.bool_]) -> DraftedRows:
        """Returns the rows that a mask [num_rows] selects, with their tokens and log-probabilities."""
        positions = np.repeat(rows[self.asks_logprobs], self.counts[self.asks_logprobs])
        return DraftedRows(
            self.counts[rows],
            self.token_ids[np.repeat(rows, self.counts)],
            self.assumed[rows],
            self.verified[rows],
            self.asks_logprobs[rows],
            None if self.logprobs is None else self.logprobs.select(positions),
        )

    def truncate(self, counts: U32) -> DraftedRows:
        """Returns the first `counts` [num_rows] tokens of each row with their log-probabilities; the draft columns
        stay as they are."""
        kept = self._within(self.counts) < np.repeat(counts, self.counts)
        asked_counts = self.counts[self.asks_logprobs]
        positions = self._within(asked_counts) < np.repeat(counts[self.asks_logprobs], asked_counts)
        logprobs = None if self.logprobs is None else self.logprobs.select(positions)
        return DraftedRows(counts, self.token_ids[kept], self.assumed, self.verified, self.asks_logprobs, logprobs)

    def columns(self) -> Iterator[I32]:
        """Yields the first tokens of all rows [num_rows], then the second ones, and so on; NO_TOKEN after a row's last
        token."""
        most = int(self.counts.max(initial=0))
        table = np.full((len(self.counts), most), NO_TOKEN, dtype=np.int32)
        table[np.arange(most) < self.counts[:, None]] = self.token_ids
        yield from table.T

    def token_columns(self, owners: I32, sequence_ids: U32) -> TokenColumns:
        """Returns the tokens in the form sent to frontends, without the rows that have none. `owners` and
        `sequence_ids`: [num_rows]."""
        rows = np.flatnonzero(self.counts)
        entries = None
        if self.logprobs is not None:
            of_asked = np.repeat(np.flatnonzero(self.asks_logprobs), self.counts[self.asks_logprobs])
            entries = LogprobColumns(owners[of_asked], sequence_ids[of_asked], self.logprobs)
        counts = None if self.all_single else self.counts[rows]
        return TokenColumns(owners[rows], sequence_ids[rows], self.token_ids, counts, entries)

    @staticmethod
    def _within(counts: U32) -> npt.NDArray[np.int64]:
        """Returns 0, 1, ... for each row, up to its count."""
        ends = np.cumsum(counts, dtype=np.int64)
        return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
