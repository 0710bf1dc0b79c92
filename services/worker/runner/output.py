"""Launched steps and their results on the host."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from quire.services.worker.device.staging import Array, Staging
from quire.services.worker.device.step_timer import StepTimer, Timings
from quire.services.worker.heads.features import Features
from quire.services.worker.heads.port import HeadLaunch, HeadResult
from quire.services.worker.sampling.sampler import SampledTokens
from quire.services.worker.step.drafts.drafts import REJECTED, DraftRows
from quire.services.worker.step.drafts.tree_rows import TokenMoves
from quire.services.worker.step.result import LogprobEntries
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32
from quire.shared.errors import QuireError

NO_FAULTS: Mapping[int, QuireError] = {}


class RunnerOutput(NamedTuple):
    """Results of a step on the host: sampled tokens by slot, logprobs, results of other heads, timings and failed
    sequences."""

    token_ids: I32  # sampled tokens, concatenated by slot; -1 if no token could be sampled
    token_counts: I32  # [num_slots]
    logprobs: LogprobEntries | None
    timings: Timings
    faults: Mapping[int, QuireError] = NO_FAULTS  # failed sequences, by slot
    # Rejected samples, as indices into all samples after `token_moves` are applied; None: no drafts.
    rejected_tokens: Rows | None = None
    answers: tuple[HeadResult, ...] = ()  # results of heads other than sampling
    token_moves: TokenMoves | None = None  # moves of accepted tree drafts; None: all are in place

    @property
    def drafted(self) -> bool:
        """Whether the step verified draft tokens, so that slots may have several tokens."""
        return self.rejected_tokens is not None

    @property
    def last_tokens(self) -> I32:
        """Last token of each sampling slot, [num_slots]."""
        return self.token_ids if not self.drafted else self.token_ids[np.cumsum(self.token_counts) - 1]

    def in_place(self, tokens: I32, sampling_tokens: I32) -> I32:
        """Returns the token indices in `tokens` with those of moved tree drafts replaced by the indices they were
        computed at.

        An accepted draft of a tree moves to the place of its position in the sequence (`token_moves`).
        `sampling_tokens`: token index of each sample. Returns `tokens` itself if nothing moved.
        """
        if self.token_moves is None:
            return tokens
        replaced, sources, targets = (
            tokens.copy(),
            sampling_tokens[self.token_moves.sources],
            sampling_tokens[self.token_moves.targets],
        )
        at = np.minimum(np.searchsorted(targets, tokens), len(targets) - 1)
        has_moved = targets[at] == tokens
        replaced[has_moved] = sources[at[has_moved]]
        return replaced

    @property
    def features(self) -> Tensor | None:
        """Hidden states [num_tokens, hidden_width] on the device if the drafter requested them."""
        return next((answer.states for answer in self.answers if isinstance(answer, Features)), None)


class Launch:
    """Launched step whose results are on their way to the host."""

    heads_launched = True  # nothing waits for other stages

    def __init__(
        self,
        timer: StepTimer,
        marks: list[Any] | None,
        staging: Staging,
        sampled: SampledTokens,
        *,
        drafts: DraftRows | None,
        endings: list[HeadLaunch],
    ) -> None:
        """Starts the copies to the host and sets the step's last timer mark after `marks` (StepTimer)."""
        self._timer = timer
        self._sampled, self._drafts, self._endings = sampled, drafts, endings
        tensors = sampled.tensors
        self._bounds = [len(tensors)]  # bounds of each head's tensors
        for ending in endings:
            tensors += ending.tensors
            self._bounds.append(len(tensors))
        self._downloads = staging.download(tensors)
        self._marks = timer.end(marks)

    def await_remote_stages(self) -> None:
        """Returns at once: a single-stage step has no remote stage to wait for."""

    def wait(self) -> RunnerOutput:
        """Blocks until the step's results are on the host and returns them, without the tokens after rejected drafts.

        Called once, on any thread. Raises device errors; errors of single sequences are in `faults`.
        """
        sampled = self._sampled
        faults = sampled.faults()  # first: the device may be waiting for grammar masks that failed
        timings = self._timer.wait(self._marks)
        arrays = self._downloads.arrays()
        token_ids = arrays[0]
        output = RunnerOutput(
            token_ids,
            np.ones(len(token_ids), dtype=np.int32),
            sampled.logprobs.columns(*arrays[1:4]) if sampled.logprobs else None,
            timings,
            faults=faults,
            answers=self._answers(arrays) if self._endings else (),
        )
        return output if self._drafts is None else _verified(self._drafts, output)

    def _answers(self, arrays: list[Array]) -> tuple[HeadResult, ...]:
        """Passes each head its part of the downloaded arrays and returns the heads' results, in launch order."""
        return tuple(
            ending.build_result(arrays[begin:end])
            for ending, (begin, end) in zip(self._endings, pairwise(self._bounds), strict=True)
        )


def _verified(drafts: DraftRows, output: RunnerOutput) -> RunnerOutput:
    """Removes the rejected samples from the output and sets tokens per slot, rejected samples and, for draft trees, the
    moves of accepted tokens."""
    kept, counts = output.token_ids != REJECTED, drafts.counted(output.token_ids)
    refused, moved = ~kept, None
    if drafts.tree is not None:
        refused = np.arange(len(kept)) - drafts.first_of_row >= np.repeat(counts, drafts.counts + 1)
        moved = TokenMoves.of(np.flatnonzero(kept), drafts.first_rows, counts)
    return output._replace(
        token_ids=output.token_ids[kept],
        token_counts=counts,
        rejected_tokens=np.flatnonzero(refused),
        token_moves=moved,
    )
