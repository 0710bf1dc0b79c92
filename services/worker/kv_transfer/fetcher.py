"""Fetches of blocks from other workers; each order is answered exactly once."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Protocol

from torch import Tensor

from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.services.worker.kv_transfer.transport import PageTransport, WantedPages
from quire.services.worker.step.plan_violation import PlanViolation, require
from quire.shared import columns
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition, Internal, QuireError, to_proto
from quire.shared.kv import block_hash
from quire.shared.kv.kv_source import KVSource
from quire.shared.logs import logger
from quire.shared.metrics.worker import WorkerMetrics
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.supervision import Tasks

log = logger("worker.kv_transfer")

MAX_CONCURRENT_FETCHES = 4  # further fetches are queued


class FetchReceiver(Protocol):
    """The attachment that ordered a fetch."""

    def blocks_fetched(self, done: pb.BlocksFetched) -> None: ...

    def abort_session(self, reason: str) -> None:
        """Ends the attachment after an invalid order."""


class PageWriter(Protocol):
    """Writes pages concurrently with a worker's steps."""

    async def write_pages(self, receiver: FetchReceiver, blocks: U32, pages: Tensor | PeerBlocks) -> None:
        """Writes pages and returns once steps may read them. Raises FailedPrecondition if the attachment has ended."""

    async def commit_pages(self, receiver: FetchReceiver, blocks: U32, hashes: list[bytes]) -> None:
        """Records the verified contents of completely written blocks. Raises as write_pages does."""

    def may_write(self, receiver: FetchReceiver) -> bool:
        """Returns whether the attachment is still current."""

    @property
    def page_layout(self) -> bytes: ...

    @property
    def page_bytes(self) -> int: ...


class Fetcher:
    """Executes fetch orders for the lifetime of the worker; close() cancels those in progress."""

    def __init__(self, writer: PageWriter, transport: PageTransport, num_blocks: int, metrics: WorkerMetrics) -> None:
        self._writer, self._transport, self._num_blocks, self._metrics = writer, transport, num_blocks, metrics
        self._semaphore = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)
        self._tasks = Tasks()

    def fetch(self, receiver: FetchReceiver, order: pb.FetchBlocks) -> None:
        """Validates an order and starts it in the background; its end or error is reported to `receiver`. An invalid
        order ends the attachment."""
        try:
            targets, wanted = self._wanted(order)
        except (PlanViolation, ValueError) as violation:
            receiver.abort_session(f"fetch {order.fetch_id} breaks the session: {violation}")
            return
        self._tasks.start(f"fetch {order.fetch_id}", self._fetch(receiver, order.fetch_id, targets, wanted))

    async def close(self) -> None:
        """Cancels all fetches and closes the transport."""
        await self._tasks.close()
        await self._transport.close()

    def _wanted(self, order: pb.FetchBlocks) -> tuple[U32, WantedPages]:
        """Parses an order into target block ids and the pages to fetch. Raises PlanViolation or ValueError for unequal
        counts and for ids that are out of range or repeated."""
        sources, targets = columns.u32(order.from_block_ids), columns.u32(order.to_block_ids)
        hashes = block_hash.split(order.block_hashes)
        counts = (len(sources), len(targets), len(hashes))
        require(len(set(counts)) == 1 and len(targets) > 0, lambda: f"{counts} sources, targets and hashes")
        inside = bool(targets.min() >= 1 and targets.max() < self._num_blocks)
        require(inside, lambda: f"block ids are not all in 1..{self._num_blocks - 1}: {targets}")
        require(len(set(targets.tolist())) == len(targets), lambda: f"block ids come more than once: {targets}")
        source = KVSource(order.worker_id, order.address, order.epoch)
        layout, page_bytes = self._writer.page_layout, self._writer.page_bytes
        return targets, WantedPages(source, order.after_step, layout, sources, hashes, page_bytes)

    async def _fetch(self, receiver: FetchReceiver, fetch_id: int, targets: U32, wanted: WantedPages) -> None:
        """Fetches pages, at most MAX_CONCURRENT_FETCHES at a time, counts them in the metrics and reports the outcome;
        raises no error. Reports nothing if the attachment has ended."""
        done = pb.BlocksFetched(fetch_id=fetch_id)
        try:
            async with self._semaphore:
                done.fetch_us = await self._receive_pages(receiver, targets, wanted)
            self._metrics.kv_received.inc(len(targets) * wanted.block_bytes)
        except QuireError as error:
            done.error.CopyFrom(to_proto(error))
        except Exception as error:
            log.exception("KV fetch failed", fetch=fetch_id)
            done.error.CopyFrom(to_proto(Internal(f"{type(error).__name__}: {error}")))
        if done.HasField("error"):
            self._metrics.kv_fetches_failed.inc()
            log.warning("cannot fetch KV blocks", source=wanted.source.worker_id, reason=done.error.message)
        if self._writer.may_write(receiver):
            receiver.blocks_fetched(done)

    async def _receive_pages(self, receiver: FetchReceiver, targets: U32, wanted: WantedPages) -> int:
        """Receives, writes and commits all pages; returns the duration in microseconds from the first page on. Raises
        FailedPrecondition if the weights change meanwhile."""
        first_ns = 0
        async with aclosing(self._transport.fetch(wanted)) as batches:
            async for batch in batches:
                first_ns = first_ns or time.perf_counter_ns()
                self._check_layout(wanted)
                part = slice(batch.first, batch.first + len(batch.content))
                await self._writer.write_pages(receiver, targets[part], batch.content)
        self._check_layout(wanted)
        await self._writer.commit_pages(receiver, targets, wanted.hashes)
        return (time.perf_counter_ns() - first_ns) // 1000

    def _check_layout(self, wanted: WantedPages) -> None:
        """Raises FailedPrecondition if this worker's layout is no longer the one that was requested."""
        if self._writer.page_layout != wanted.layout:
            raise FailedPrecondition("the weights changed during the fetch")
