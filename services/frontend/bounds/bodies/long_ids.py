"""A long list of token ids in a JSON body, taken out of it as packed numbers.

Parsed, each id would be an object of Python's and take 36 bytes for the 2 to 7 that it was sent as.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

import numpy as np

FIELD = "tokens"  # of /detokenize: the only ids of which there may be more than a context holds
PLACE = re.compile(rb'"tokens"\s*:\s*\[([0-9,\s]+)\]')
# What numpy would read and JSON is not, and what is too long for 32 bits.
ODD = re.compile(rb"(?:^|[,\s])0[0-9]|[0-9]\s+[0-9,]|,\s*,|^\s*,|,\s*$|[0-9]{10}")
LONG_BYTES = 1 << 14
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExtractedIds:
    """A body whose list is empty, and what was in it."""

    body: bytes
    ids: bytes  # i32 column


def extract_ids(body: bytes) -> ExtractedIds | None:
    """None where there is no such list, or it is not plain, or more than one may be meant."""
    found = PLACE.search(body)
    if found is None or len(found[1]) < LONG_BYTES or body.count(b'"tokens"') != 1 or ODD.search(found[1]):
        return None
    ids = np.fromstring(found[1].decode(), dtype=np.int32, sep=",")
    assert len(ids) == found[1].count(b",") + 1
    return ExtractedIds(body[: found.start(1)] + body[found.end(1) :], ids.tobytes())


def unpack_ids(column: bytes | memoryview) -> array[int]:
    """A sequence of ints that takes no more than the column."""
    ids = array("i")
    ids.frombytes(column)
    return ids
