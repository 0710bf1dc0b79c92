"""MaxSim (ColBERT, arXiv 2004.12832): scores documents against queries by their tokens' vectors."""

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

MAX_PRODUCTS = 1 << 24  # products per batch, float32: 64 MiB


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """Token vectors of texts of different lengths, none of them empty."""

    vectors: Tensor  # float32 [num_vectors, size]
    starts: Ints  # [num_texts] first vector of each text
    lengths: Ints  # [num_texts]

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def select(self, texts: Ints) -> TokenVectors:
        """Returns some of the texts, by index and possibly repeated; shares the vectors."""
        return TokenVectors(self.vectors, self.starts[texts], self.lengths[texts])

    def padded(self) -> Tensor:
        """Returns [num_texts, longest, size], each text padded with copies of its last vector."""
        within = np.minimum(np.arange(self.longest), self.lengths[:, None] - 1)
        places = upload((self.starts[:, None] + within).ravel(), self.vectors.device)
        return self.vectors.index_select(0, places).view(len(self.starts), self.longest, -1)


def max_sim(queries: TokenVectors, documents: TokenVectors, max_products: int = MAX_PRODUCTS) -> Tensor:
    """Scores each document: the sum over its query's vectors of the largest product with one of the document's
    vectors.

    `queries` holds one query per document; `max_products` limits a batch. Returns float32 [num_documents]; never
    synchronizes with the device.
    """
    order = np.argsort(-documents.lengths, kind="stable")
    scores = [
        _scores(queries.select(rows), documents.select(rows), max_products)
        for rows in _batches(order, documents, queries.longest, max_products)
    ]
    in_order = torch.cat(scores)
    return in_order.index_select(0, upload(np.argsort(order), in_order.device))


def _batches(order: Ints, documents: TokenVectors, max_query_len: int, max_products: int) -> Iterator[Ints]:
    """Yields documents of similar length, the longest first, so that less than half of a batch is padding."""
    firsts = [0]
    longest = int(documents.lengths[order[0]])
    for place, length in enumerate(documents.lengths[order].tolist()):
        if 2 * length < longest or (place - firsts[-1] + 1) * longest * max_query_len > max_products:
            firsts.append(place)
            longest = length
    return (order[begin:end] for begin, end in pairwise([*firsts, len(order)]) if begin < end)


def _scores(queries: TokenVectors, documents: TokenVectors, max_products: int) -> Tensor:
    """Computes a batch in one product; a document's padding changes no maximum, a query's padding is masked out."""
    padded = documents.padded().transpose(1, 2)
    vectors_at_once = max(
        1, max_products // (len(documents.starts) * documents.longest)
    )  # limits memory for a long query with a long document
    best = [torch.bmm(part, padded).amax(dim=2) for part in queries.padded().split(vectors_at_once, dim=1)]
    products = best[0] if len(best) == 1 else torch.cat(best, dim=1)
    if int(queries.lengths.min()) < queries.longest:
        beyond = np.arange(queries.longest) >= queries.lengths[:, None]
        products = products.masked_fill(upload(beyond, products.device), 0)
    return products.sum(dim=1)
