"""Extracts a long list of token ids from a JSON body as packed numbers.

Parsed by json, each id would be a Python object of 36 bytes for the 2 to 7 bytes it was sent as.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

import numpy as np

FIELD = "tokens"  # of /detokenize, the only list of ids that may exceed the context length
LIST_PATTERN = re.compile(rb'"tokens"\s*:\s*\[([0-9,\s]+)\]')
# Accepted by numpy but not valid JSON, or too long for 32 bits.
INVALID = re.compile(rb"(?:^|[,\s])0[0-9]|[0-9]\s+[0-9,]|,\s*,|^\s*,|,\s*$|[0-9]{10}")
LONG_BYTES = 1 << 14
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExtractedIds:
    """A body with an emptied list, and the ids of that list."""

    body: bytes
    ids: bytes  # i32 column


def extract_ids(body: bytes) -> ExtractedIds | None:
    """Returns the body without its id list and the ids; None if there is no such list, it is malformed, or the field
    occurs more than once."""
    found = LIST_PATTERN.search(body)
    if found is None or len(found[1]) < LONG_BYTES or body.count(b'"tokens"') != 1 or INVALID.search(found[1]):
        return None
    ids = np.fromstring(found[1].decode(), dtype=np.int32, sep=",")
    assert len(ids) == found[1].count(b",") + 1
    return ExtractedIds(body[: found.start(1)] + body[found.end(1) :], ids.tobytes())


def unpack_ids(column: bytes | memoryview) -> array[int]:
    """Returns the ids as a sequence that takes no more memory than the column."""
    ids = array("i")
    ids.frombytes(column)
    return ids
