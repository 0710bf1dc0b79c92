"""What tells that a page arrived as it left, and that it is the one that was asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.shared.columns import U32

Bytes2D = npt.NDArray[np.uint8]  # [num_pages, bytes of a page]


def checksums(layout: bytes, hashes: Sequence[bytes], pages: Bytes2D) -> U32:
    """CRC-32 of the layout, a page's hash and its bytes, for each page. A gigabyte takes half a second, and other
    threads run meanwhile."""
    found = [zlib.crc32(page, zlib.crc32(layout + digest)) for digest, page in zip(hashes, pages, strict=True)]
    return np.array(found, dtype=np.uint32)
