"""How the tokens of a long step are shared out among ranks, each of which has the whole model. Host side only: numpy.

A row's causal attention costs most at its end, so that a long one is cut into twice as many pieces as there are ranks,
and a rank has one from the front and the one as far from the end (arXiv 2407.21783, 3.3.2): as many tokens and as much
attention for each. Short rows go to a rank as a whole. A piece is a row like any other: its last position is where it
ends, and what is before it lies in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32

FEW = 8  # a row with more than so small a part of a rank's tokens is cut


def least_tokens(size: int) -> int:
    """Of a step that is shared out among `size` ranks: so many that each rank has some, and each piece."""
    return 2 * FEW * size * size


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Of one step."""

    inputs: StepInputs
    pieces: tuple[tuple[Rows, Rows, Rows], ...]  # by rank, ascending: of each its row, and its first and last token + 1
    owners: Rows  # [num_tokens] whose each token is
    places: Rows  # [num_tokens] which of its owner's it is
    most: int  # tokens of the rank that has most

    @property
    def size(self) -> int:
        return len(self.pieces)

    def tokens(self, rank: int) -> Rows:
        """Its own, as indices into the step's."""
        return np.flatnonzero(self.owners == rank)

    def slot_mappings(self, num_groups: int) -> I32:
        """[num_groups, size, most] where the keys and values of each rank's tokens go; behind them the null block."""
        mappings = np.zeros((num_groups, self.size, self.most), dtype=np.int32)
        mappings[:, self.owners, self.places] = self.inputs.slot_mapping.reshape(num_groups, -1)
        return mappings

    def wanted(self, tokens: I32 | Rows) -> WantedTokens:
        """How the ranks hand each other what they make of `tokens` of the step."""
        owners = self.owners[tokens]
        counts = np.bincount(owners, minlength=self.size)
        most = max(int(counts.max()), 1)
        own = np.zeros((self.size, most), dtype=np.int32)
        order = np.zeros(len(tokens), dtype=np.int32)
        for rank in range(self.size):
            here = np.flatnonzero(owners == rank)
            own[rank, : len(here)] = self.places[tokens[here]]
            order[here] = rank * most + np.arange(len(here))
        return WantedTokens(own, order)

    def of(self, rank: int, wanted: WantedTokens) -> StepInputs:
        """A rank's part as a step of its own, whose samples are what it makes of the wanted tokens."""
        inputs, tokens = self.inputs, self.tokens(rank)
        rows, begins, ends = self.pieces[rank]
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(ends - begins, out=query_start[1:])
        positions, mine = inputs.positions[tokens], wanted.own[rank]
        fed = np.flatnonzero(self.owners[inputs.prev_sampled_tokens] == rank)
        slots = inputs.slots[rows]
        return replace(
            inputs,
            slots=slots,
            token_ids=inputs.token_ids[tokens],
            positions=positions,
            slot_mapping=inputs.slot_mapping.reshape(-1, inputs.num_tokens)[:, tokens].ravel(),
            query_start=query_start,
            seq_lens=inputs.positions[ends - 1] + np.int32(1),
            prev_sampled_tokens=self.places[inputs.prev_sampled_tokens[fed]].astype(np.int32),
            prev_sampled_slots=inputs.prev_sampled_slots[fed],
            sampling_slots=slots[np.searchsorted(query_start, mine, side="right") - 1],
            sampling_tokens=mine,
            sample_positions=positions[mine] + np.int32(1),
            drafts=None,
            follows=0,
        )


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Of each rank as many, at least one, so that all take the same part in what ranks do together."""

    own: I32  # [size, most] by rank, which of its tokens; behind them its first one
    order: I32  # [num_wanted] where each is among [size * most]


def share_out(inputs: StepInputs, size: int) -> TokenShares | None:
    """None for steps that every rank computes by itself: short ones, and those in which every row has one token."""
    total = inputs.num_tokens
    if total < least_tokens(size) or total == inputs.num_rows:
        return None
    counts = np.diff(inputs.query_start)
    is_cut = counts > total // (FEW * size)
    loads = np.zeros(size, dtype=np.int64)
    pieces: list[tuple[int, int, int, int]] = []  # rank, row, begin, end
    for row in np.flatnonzero(is_cut).tolist():
        pieces += _cut(row, int(inputs.query_start[row]), int(counts[row]), size)
    for rank, _, begin, end in pieces:
        loads[rank] += end - begin
    short = np.flatnonzero(~is_cut & (counts > 0))
    for row in short[np.argsort(-counts[short], kind="stable")].tolist():
        rank, begin = int(loads.argmin()), int(inputs.query_start[row])
        pieces.append((rank, row, begin, begin + int(counts[row])))
        loads[rank] += counts[row]
    return _shares(inputs, np.array(sorted(pieces, key=lambda piece: piece[2]), dtype=np.intp), size)


def _cut(row: int, begin: int, count: int, size: int) -> list[tuple[int, int, int, int]]:
    """The two pieces in the middle are of one rank, and so are one."""
    bounds = [begin + count * part // (2 * size) for part in range(2 * size + 1) if part != size]
    ranks = [*range(size), *reversed(range(size - 1))]
    return [(rank, row, *bounds[part : part + 2]) for part, rank in enumerate(ranks)]


def _shares(inputs: StepInputs, pieces: Rows, size: int) -> TokenShares:
    """`pieces` [num_pieces, 4], side by side."""
    ranks, rows, begins, ends = pieces.T
    owners = np.repeat(ranks, ends - begins)
    places = np.zeros(len(owners), dtype=np.intp)
    counts = np.bincount(owners, minlength=size)
    for rank in range(size):
        places[owners == rank] = np.arange(counts[rank])
    by_rank = tuple((rows[ranks == rank], begins[ranks == rank], ends[ranks == rank]) for rank in range(size))
    return TokenShares(inputs, by_rank, owners, places, int(counts.max()))
