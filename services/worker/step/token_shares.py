"""Partition of a long step's tokens among context-parallel ranks, which all hold the whole model. Numpy only.

Causal attention costs most at the end of a row, so a long row is cut into twice as many pieces as there are ranks, and
a rank gets one from the front and its mirror from the end (arXiv 2407.21783, 3.3.2): equal tokens and equal attention
for each. Short rows go to one rank whole. A piece is a row like any other: its sequence length ends at its last
position, and the positions before it are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32

FEW = 8  # rows with more than 1/FEW of a rank's tokens are cut


def least_tokens(size: int) -> int:
    """Returns the fewest tokens of a step that is partitioned among `size` ranks: every rank and piece gets some."""
    return 2 * FEW * size * size


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Assignment of the tokens of one step to context-parallel ranks."""

    inputs: StepInputs
    pieces: tuple[tuple[Rows, Rows, Rows], ...]  # by rank: row, first token and last token + 1 of each piece, ascending
    owners: Rows  # [num_tokens] rank of each token
    places: Rows  # [num_tokens] index within its rank's tokens
    most: int  # largest number of tokens of a rank

    @property
    def size(self) -> int:
        return len(self.pieces)

    def tokens(self, rank: int) -> Rows:
        """Returns the indices of the rank's tokens within the step."""
        return np.flatnonzero(self.owners == rank)

    def slot_mappings(self, num_groups: int) -> I32:
        """Returns the KV slots of each rank's tokens, [num_groups, size, most], padded with the null block."""
        mappings = np.zeros((num_groups, self.size, self.most), dtype=np.int32)
        mappings[:, self.owners, self.places] = self.inputs.slot_mapping.reshape(num_groups, -1)
        return mappings

    def wanted(self, tokens: I32 | Rows) -> WantedTokens:
        """Returns how ranks exchange the hidden states of the step's `tokens` (indices, in the order of the result)."""
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

    def share_of(self, rank: int, wanted: WantedTokens) -> StepInputs:
        """Returns the rank's part as a step of its own: its pieces are the rows, and its samples are the wanted tokens
        that it owns, padded."""
        inputs, tokens = self.inputs, self.tokens(rank)
        rows, begins, ends = self.pieces[rank]
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(ends - begins, out=query_start[1:])
        positions, own_tokens = inputs.positions[tokens], wanted.own[rank]
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
            sampling_slots=slots[np.searchsorted(query_start, own_tokens, side="right") - 1],
            sampling_tokens=own_tokens,
            sample_positions=positions[own_tokens] + np.int32(1),
            drafts=None,
            follows=0,
        )


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Tokens whose hidden states are gathered; every rank contributes equally many, at least one."""

    own: I32  # [size, most] indices within the rank's tokens, padded with its first one
    order: I32  # [num_wanted] position of each among the [size * most] gathered rows


def share_out(inputs: StepInputs, size: int) -> TokenShares | None:
    """Partitions the step among `size` ranks: cuts long rows, and gives each short one, the longest first, to the least
    loaded rank. Returns None for steps that every rank computes itself: short ones and pure decodes."""
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
    """Cuts the row of `count` tokens from `begin` on into front and end pieces, as (rank, row, begin, end); the two
    middle pieces belong to one rank and are merged."""
    bounds = [begin + count * part // (2 * size) for part in range(2 * size + 1) if part != size]
    ranks = [*range(size), *reversed(range(size - 1))]
    return [(rank, row, *bounds[part : part + 2]) for part, rank in enumerate(ranks)]


def _shares(inputs: StepInputs, pieces: Rows, size: int) -> TokenShares:
    """Builds TokenShares from `pieces` [num_pieces, 4]: rank, row, begin, end."""
    ranks, rows, begins, ends = pieces.T
    owners = np.repeat(ranks, ends - begins)
    places = np.zeros(len(owners), dtype=np.intp)
    counts = np.bincount(owners, minlength=size)
    for rank in range(size):
        places[owners == rank] = np.arange(counts[rank])
    by_rank = tuple((rows[ranks == rank], begins[ranks == rank], ends[ranks == rank]) for rank in range(size))
    return TokenShares(inputs, by_rank, owners, places, int(counts.max()))
