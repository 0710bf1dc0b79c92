"""Interface of page transports between workers.

gRPC is one implementation (grpc_transport.py), which between GPUs of one host only sends the location of the pages
(peer_pages.py). A faster one between hosts (NCCL, RDMA) would be another."""

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
    """Blocks to fetch from another worker, in the attachment that `source` names."""

    source: KVSource
    after_step: int  # the blocks are filled once the source has computed this step
    layout: bytes  # required layout digest
    blocks: U32
    hashes: list[bytes]  # content hash of each block, same order
    block_bytes: int


@dataclass(frozen=True, slots=True)
class FetchedPages:
    """The next batch of the wanted pages; bytes are verified, shared blocks only when the consumer has copied them."""

    first: int  # index of the first page among the wanted ones
    content: Tensor | PeerBlocks  # uint8 [num_blocks, bytes of a page], or blocks to copy before the next batch


class PageMismatch(Internal):
    """Received pages differ from the wanted ones."""


class PageTransport(Protocol):
    """Fetches pages from other workers."""

    def fetch(self, wanted: WantedPages) -> AsyncGenerator[FetchedPages, None]:
        """Yields all pages in order, a bounded number at a time; ends in bounded time whatever the source does. Raises
        QuireError if the pages are unavailable or differ from the wanted ones."""

    async def close(self) -> None: ...
