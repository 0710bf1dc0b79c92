"""Preallocates numpy's cache of small arrays: for each size under 1,024 bytes it keeps seven freed buffers, 3.5 MiB at
most.

Columns have as many rows as there are running sequences, so new sizes appear for hours: a scheduler grew by 170 KB
per 10,000 sequences, which looks like a leak. Filled at start-up, the cache does not grow later.
"""

from __future__ import annotations

import numpy as np

SIZES = 1024  # bytes
KEPT = 7  # buffers of each


def preallocate() -> None:
    """Fills the cache; takes a millisecond or two."""
    for num_bytes in range(1, SIZES):
        _ = [np.empty(num_bytes, np.uint8) for _ in range(KEPT)]  # freed together, so that all of them are cached
