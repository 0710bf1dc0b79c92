"""What numpy keeps of small arrays that are gone: for each size under 1,024 bytes seven buffers, 3.5 MiB at most.

Columns have as many rows as sequences run, so that new sizes come up for hours: a scheduler grew by 170 KB for every
10,000 sequences, for a reason that looks like a leak. Filled at the start, what a service needs later is what it has.
"""

from __future__ import annotations

import numpy as np

SIZES = 1024  # bytes
KEPT = 7  # buffers of each


def preallocate() -> None:
    """Takes a millisecond or two."""
    for num_bytes in range(1, SIZES):
        _ = [np.empty(num_bytes, np.uint8) for _ in range(KEPT)]  # all at once: those that are gone together are kept
