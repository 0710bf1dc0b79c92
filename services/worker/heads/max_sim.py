"""MaxSim (ColBERT, arXiv 2004.12832): how well documents answer queries by their tokens' vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload

Ints = npt.NDArray[np.intp]

MAX_PRODUCTS = 1 << 24  # of a batch, float32: 64 MiB


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """TokenVectors of different lengths, none of them empty."""

    vectors: Tensor  # float32 [num_vectors, size]
    starts: Ints  # [num_texts] in these
    lengths: Ints  # [num_texts]

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def select(self, texts: Ints) -> TokenVectors:
        return TokenVectors(self.vectors, self.starts[texts], self.lengths[texts])

    def padded(self) -> Tensor:
        """[num_texts, longest, size]: behind a text's vectors its last one, again and again."""
        within = np.minimum(np.arange(self.longest), self.lengths[:, None] - 1)
        places = upload((self.starts[:, None] + within).ravel(), self.vectors.device)
        return self.vectors.index_select(0, places).view(len(self.starts), self.longest, -1)


def max_sim(queries: TokenVectors, documents: TokenVectors) -> Tensor:
    """float32 [num_documents]: of each, the sum over the vectors of the query that stands in its place of the greatest
    product with one of its own. Never waits for the device."""
    order = np.argsort(-documents.lengths, kind="stable")
    scores = [
        _scores(queries.select(rows), documents.select(rows)) for rows in _batches(order, documents, queries.longest)
    ]
    found = torch.cat(scores)
    return found.index_select(0, upload(np.argsort(order), found.device))


def _batches(order: Ints, documents: TokenVectors, max_query_len: int) -> Iterator[Ints]:
    """Documents of like length, the longest first, so that padding is less than what is padded."""
    firsts = [0]
    longest = int(documents.lengths[order[0]])
    for place, length in enumerate(documents.lengths[order].tolist()):
        if 2 * length < longest or (place - firsts[-1] + 1) * longest * max_query_len > MAX_PRODUCTS:
            firsts.append(place)
            longest = length
    return (order[begin:end] for begin, end in pairwise([*firsts, len(order)]) if begin < end)


def _scores(queries: TokenVectors, documents: TokenVectors) -> Tensor:
    """One product for all. The padding of documents changes no maximum, that of queries counts nothing."""
    padded = documents.padded().transpose(1, 2)
    at_a_time = max(
        1, MAX_PRODUCTS // (len(documents.starts) * documents.longest)
    )  # a long one, beside a long document
    best = [torch.bmm(part, padded).amax(dim=2) for part in queries.padded().split(at_a_time, dim=1)]
    found = best[0] if len(best) == 1 else torch.cat(best, dim=1)
    if int(queries.lengths.min()) < queries.longest:
        beyond = np.arange(queries.longest) >= queries.lengths[:, None]
        found = found.masked_fill(upload(beyond, found.device), 0)
    return found.sum(dim=1)
