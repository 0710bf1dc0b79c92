"""Expert parallelism by dispatch: rows are sent to the ranks of their experts (dispatch) and back (combine).

All-to-all as in GShard (arXiv 2006.16668, 3.2) and DeepSeek V3 (arXiv 2412.19437, 3.2.2). A rank owns consecutive rows:
it reduces attention's partial sums for them, normalizes and routes them. The choices for all rows, a hundredth of the
rows' bytes, are gathered, so that each rank knows all routes. A row is sent once to a rank, however many of its experts
are there, and one sum returns. The owner adds the sums in rank order, and all rows are gathered for the next layer's
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.feed_forward.expert_placement import NO_EXPERT

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.feed_forward.expert_placement import ExpertPlacement
    from quire.services.worker.layers.sharding import Shard

# rows [n, hidden_size], local expert indices and weights [n, top_k] -> [n, hidden_size]
ExpertFunction = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Chosen experts of all rows of a step, known to every rank: [num_tokens, top_k] each."""

    ids: Tensor  # int32
    weights: Tensor  # float32


@dataclass(frozen=True, slots=True)
class RowRoutes:
    """Routes of rows between ranks for one layer, including a rank's rows to itself."""

    sent: list[int]  # rows to send, by rank
    received: list[int]  # rows to receive, by rank
    going: Tensor  # int64: indices of rows to send within this rank's rows, rank by rank
    coming: Tensor  # int64: rows of the step that this rank computes, ascending


def needed_by(ranks: Tensor, size: int) -> Tensor:
    """Maps ranks [num_tokens, top_k] of the chosen experts to bool [num_tokens, size]: ranks that compute each row."""
    import torch  # lazy: families are also read without torch

    wanted = torch.zeros((len(ranks), size), dtype=torch.bool, device=ranks.device)
    return wanted.scatter_(1, ranks.long(), True)


def route_counts(wanted: Tensor) -> Tensor:
    """Counts rows by owner and computing rank: bool [num_tokens, size] -> int64 [size, size]."""
    size = wanted.size(1)
    return _filled(wanted, -(-len(wanted) // size) * size).view(size, -1, size).sum(1)


def _filled(x: Tensor, num_rows: int) -> Tensor:
    """Pads x with zero rows to `num_rows`; returns `x` itself if it has enough."""
    missing = num_rows - x.size(0)
    if not missing:
        return x
    import torch

    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


class ExpertDispatch:
    """Dispatch and combine of one layer's rows between expert-parallel ranks.

    All ranks must call its methods in the same order.
    """

    def __init__(self, shard: Shard, places: ExpertPlacement) -> None:
        self._shard, self._places = shard, places

    @staticmethod
    def is_supported(x: Tensor) -> bool:
        """Returns whether rows can be dispatched: not in CUDA graphs, whose shapes are fixed while routes vary."""
        if not x.is_cuda:
            return True
        import torch

        return not torch.cuda.is_current_stream_capturing()

    def own_rows(self, num_tokens: int) -> range:
        """Returns the rows of a step that this rank owns."""
        return self._shard.rows(num_tokens)

    def own(self, x: Tensor) -> Tensor:
        """Copies this rank's rows: [num_tokens, n] -> [room, n], zero-padded to the same number on all ranks."""
        rows = self.own_rows(x.size(0))
        part, room = x[rows.start : rows.stop], self._shard.room(x.size(0))
        return part.clone() if len(rows) == room else _filled(part, room)

    def reduce_scatter_rows(self, parts: Tensor) -> Tensor:
        """Sums over all ranks and keeps this rank's rows: [num_tokens, n] -> [room, n]."""
        num_rows = self._shard.size * self._shard.room(parts.size(0))
        return self._shard.collectives.reduce_scatter(_filled(parts, num_rows))

    def all_gather_rows(self, own: Tensor, num_tokens: int) -> Tensor:
        """Gathers all ranks' rows: [room, n] -> [num_tokens, n]."""
        return self._shard.collectives.all_gather(own).flatten(0, 1)[:num_tokens]

    def gather_choices(self, ids: Tensor, weights: Tensor, num_tokens: int) -> ExpertChoices:
        """Gathers the choices of all ranks' rows, [room, top_k] each."""
        import torch

        top_k = ids.size(1)
        both = self.all_gather_rows(torch.cat((ids, weights.view(torch.int32)), dim=1), num_tokens)
        return ExpertChoices(both[:, :top_k].contiguous(), both[:, top_k:].contiguous().view(torch.float32))

    def routes(self, ids: Tensor) -> RowRoutes:
        """Computes the routes of all rows from their chosen experts, ids [num_tokens, top_k].

        Waits for the device, because the host needs the numbers of rows to send.
        """
        needed = needed_by(self._places.ranks_of(ids), self._shard.size)
        counts, rank = route_counts(needed).tolist(), self._shard.rank
        rows = self.own_rows(len(ids))
        sent_rows = needed[rows.start : rows.stop].t().nonzero()[:, 1]
        received_rows = needed[:, rank].nonzero()[:, 0]
        return RowRoutes(counts[rank], [owner[rank] for owner in counts], sent_rows, received_rows)

    def run_experts(self, own: Tensor, choices: ExpertChoices, places: Tensor, run: ExpertFunction) -> Tensor:
        """Runs the chosen experts of this rank's rows on the ranks that have them: own [room, n] -> float32 sums of the
        same shape.

        `places` [num_tokens, top_k]: local indices of all rows' experts; `run`: runs this rank's experts. A rank may
        get all rows of a step and always allocates for them, so the memory of a step does not depend on its choices.
        """
        import torch

        routes, num_tokens = self.routes(choices.ids), len(choices.ids)
        rows, num_here = own.new_empty((num_tokens, own.size(1))), len(routes.coming)
        self._swap(own[routes.going], routes.sent, rows, routes.received)
        local_indices = torch.full_like(places, NO_EXPERT)
        local_indices[:num_here] = places[routes.coming]
        weights = torch.zeros_like(choices.weights)
        weights[:num_here] = choices.weights[routes.coming]
        outputs = run(rows, local_indices, weights)[:num_here]
        returned = own.new_empty((self._shard.size * own.size(0), own.size(1)))
        self._swap(outputs, routes.received, returned, routes.sent)
        return _summed(own, routes, returned)

    def _swap(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        self._shard.collectives.all_to_all(rows, sent, into[: sum(received)], received)


def _summed(own: Tensor, routes: RowRoutes, returned: Tensor) -> Tensor:
    """Adds the sums returned by other ranks to each own row, in rank order, so that a row has the same bits each
    time."""
    import torch

    out = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
    num_rows = len(routes.going)
    for rows, returned_rows in zip(
        routes.going.split(routes.sent), returned[:num_rows].split(routes.sent), strict=True
    ):
        out.index_add_(0, rows, returned_rows.float())  # each row occurs once
    return out
