"""Beam search: selects the sequences to continue and decides when the search ends. Pure; independent of slots and
blocks.

The score of a sequence is the sum of its tokens' log-probabilities divided by (number of its tokens) ** length_penalty;
the token that ended it counts. At each step the `width` best continuations of all live beams that do not end are kept;
those that end are finished. The search ends when no live beam can still become one of the best (with early stopping:
when `width` have finished), or at the maximum length, where the live beams finish as they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.sequences.ending import Reason


@dataclass(frozen=True, slots=True)
class BeamRules:
    """Parameters of a search, from the request: `width` beams are live at a time, and the best `num_outputs`
    sequences are returned."""

    width: int
    num_outputs: int
    max_output_tokens: int
    end_token_ids: frozenset[int]  # end-of-sequence and stop tokens
    length_penalty: float = 1.0
    early_stopping: bool = False

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens needed of each beam: twice the width, as is customary, or enough that `width` of
        them do not end the beam."""
        return max(2 * self.width, self.width + len(self.end_token_ids))

    def score(self, total: float, length: int) -> float:
        return float(total / length**self.length_penalty)


class BeamCandidates(NamedTuple):
    """Most likely next tokens of a beam, best first."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class BeamNode:
    """One token of a beam, with its parent and its candidates."""

    parent: BeamNode | None  # None: the prompt
    token: int
    logprob: float
    rank: int  # among the candidates, from 1
    candidates: BeamCandidates
    total: float  # log-probability of all tokens up to this one
    length: int

    def path(self) -> list[BeamNode]:
        """Returns the nodes from the first output token to this one."""
        nodes: list[BeamNode] = []
        node: BeamNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class BeamChild(NamedTuple):
    """Live beam of the next step, as the continuation of a beam of this one."""

    parent: int  # index of the beam that it continues
    node: BeamNode


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Finished sequence of a beam search, with its last node and the reason why it ended."""

    node: BeamNode
    score: float
    reason: Reason


@dataclass(slots=True)
class BeamSearchState:
    """State between two steps; another worker can continue from it."""

    rules: BeamRules
    live: list[BeamNode | None] = field(default_factory=lambda: [None])  # the last node of each beam; None: the prompt
    finished: list[Hypothesis] = field(default_factory=list)  # the best `width`, best first

    def limit(self, max_output_tokens: int) -> None:
        """Limits the output length of the search."""
        if max_output_tokens < self.rules.max_output_tokens:
            self.rules = replace(self.rules, max_output_tokens=max_output_tokens)

    def advance(self, candidates: list[BeamCandidates]) -> list[BeamChild]:
        """Returns the live beams that follow from the candidates of each live one; none if the search has ended.
        Replaces `live` and adds the sequences that an end token or the length limit ended to `finished`."""
        ended, going_on = [], []
        for parent, node in self._continuations(candidates):
            if node.token in self.rules.end_token_ids:
                ended.append(Hypothesis(node, self.rules.score(node.total, node.length), Reason.STOP))
            else:
                going_on.append(BeamChild(parent, node))
        children = heapq.nlargest(self.rules.width, going_on, key=lambda child: child.node.total)
        self._finish(ended)
        if children and children[0].node.length >= self.rules.max_output_tokens:
            self._finish(
                [Hypothesis(c.node, self.rules.score(c.node.total, c.node.length), Reason.LENGTH) for c in children]
            )
            children = []
        elif self._is_decided(children):
            children = []
        self.live = [child.node for child in children]
        return children

    def _continuations(self, candidates: list[BeamCandidates]) -> Iterator[tuple[int, BeamNode]]:
        """Yields each live beam continued by each of its candidates, as (index of the beam, node); banned tokens,
        whose log-probability is -inf, are skipped."""
        for parent, (node, entries) in enumerate(zip(self.live, candidates, strict=True)):
            total, length = (0.0, 0) if node is None else (node.total, node.length)
            for rank, (token, logprob) in enumerate(
                zip(entries.token_ids.tolist(), entries.logprobs.tolist(), strict=True), start=1
            ):
                if logprob > -np.inf:  # -inf: the token is banned
                    yield parent, BeamNode(node, token, logprob, rank, entries, total + logprob, length + 1)

    def _finish(self, ended: list[Hypothesis]) -> None:
        self.finished = heapq.nlargest(self.rules.width, [*self.finished, *ended], key=lambda h: h.score)

    def _is_decided(self, children: list[BeamChild]) -> bool:
        """Returns whether no continuation of `children` can improve the results: there is none, early_stopping has
        its `width` finished sequences, or the best attainable score does not exceed the worst result."""
        rules = self.rules
        if not children:
            return True
        if rules.early_stopping:
            return len(self.finished) >= rules.width
        if len(self.finished) < rules.num_outputs:
            return False
        best = children[0].node
        longest = rules.max_output_tokens if rules.length_penalty > 0 else best.length + 1
        return self.finished[rules.num_outputs - 1].score >= rules.score(best.total, longest)

    @property
    def results(self) -> list[Hypothesis]:
        """The best finished sequences, best first; fewer than asked for if there are no more."""
        return self.finished[: self.rules.num_outputs]
