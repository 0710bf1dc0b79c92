"""How pages get from one worker to another. gRPC is one way (grpc_transport.py), and between GPUs of one host it only
says where they lie (peer_pages.py); whatever moves them faster between hosts (NCCL, RDMA) is another implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.shared.columns import U32
from quire.shared.errors import Internal
from quire.shared.kv.kv_source import KVSource


@dataclass(frozen=True, slots=True)
class WantedPages:
    """Blocks of another worker, in the attachment that `source` names."""

    source: KVSource
    after_step: int  # what they hold is there once it has computed this step
    layout: bytes  # what their bytes are to mean
    blocks: U32
    hashes: list[bytes]  # of what they hold, same order
    block_bytes: int


@dataclass(frozen=True, slots=True)
class FetchedPages:
    """The next of those that were wanted; they are what left the other worker."""

    first: int  # which
    content: Tensor | PeerBlocks  # uint8 [num_blocks, bytes of a page]; or where they lie, to be copied before the next


class PageMismatch(Internal):
    """What came is not what was wanted."""


class PageTransport(Protocol):
    """One worker's way to the pages of others."""

    def fetch(self, wanted: WantedPages) -> AsyncGenerator[FetchedPages, None]:
        """All of them, in their order, a bounded number at a time. Ends in time, whatever the other worker does. Raises
        QuireError if they cannot be had, or are not what was wanted."""

    async def close(self) -> None: ...
