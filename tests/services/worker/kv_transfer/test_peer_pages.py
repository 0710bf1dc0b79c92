"""Pages copied from GPU to GPU, located over gRPC. The GPUs are simulated by host memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest
import torch

from quire.services.worker.device import peer_driver
from quire.services.worker.device.peer_driver import PeerMemoryError
from quire.services.worker.kv_transfer import grpc_transport, page_service, peer_pages
from quire.services.worker.kv_transfer.grpc_transport import FetchBounds, GrpcTransport
from quire.services.worker.kv_transfer.page_service import ServingBounds
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks, PeerPages, contiguous_runs
from quire.services.worker.kv_transfer.transport import FetchedPages, PageMismatch, WantedPages
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition, Unavailable
from quire.shared.pb.worker.v1 import kv_transfer_pb2 as pb
from quire.shared.pb.worker.v1 import kv_transfer_pb2_grpc
from quire.shared.rpc.trust import Dialler
from tests.services.worker.kv_transfer.peer_memory import Library, pages_of
from tests.services.worker.kv_transfer.test_grpc_transport import (
    EPOCH,
    NUM_BLOCKS,
    PIECE_BYTES,
    Liar,
    Memory,
    service,
    serving,
    wanted,
)
from tests.waiting import eventually, stays

BLOCKS = np.array([3, 4, 5, 19, 1, 2], dtype=np.uint32)
TARGETS = np.array([7, 8, 9, 10, 3, 1], dtype=np.uint32)


def test_runs_are_copied_at_once() -> None:
    assert contiguous_runs(BLOCKS, TARGETS) == [(3, 7, 3), (19, 10, 1), (1, 3, 1), (2, 1, 1)]


@pytest.mark.parametrize("max_pitch", [peer_pages.MAX_PITCH, 100], ids=["all parts at once", "part by part"])
async def test_blocks_are_copied_and_nothing_else(max_pitch: int) -> None:
    library = Library()
    there, theirs = pages_of(library, 20)
    here, ours = pages_of(library, 12, max_pitch=max_pitch)
    was = here.clone()
    async with ours.opened(theirs.own) as reason:
        assert not reason
        ours.copy(PeerBlocks(theirs.own, BLOCKS), TARGETS, 0)
    assert torch.equal(here[:, TARGETS.astype(np.int64)], there[:, BLOCKS.astype(np.int64)])
    others = [block for block in range(12) if block not in TARGETS]
    assert torch.equal(here[:, others], was[:, others])


async def test_idle_memory_is_closed() -> None:
    """Otherwise a restarted source would find its old KV still allocated on its GPU."""
    library = Library()
    (_, theirs), (_, ours) = pages_of(library, 20), pages_of(library, 12, idle_s=0.01)
    async with ours.opened(theirs.own), ours.opened(theirs.own):
        await stays(lambda: len(library.opened) == 1, 0.05)
    await eventually(lambda: not library.opened)
    async with ours.opened(theirs.own) as reason:
        assert not reason
    await ours.close()
    assert not library.opened


async def test_invalid_shared_pages_are_not_opened() -> None:
    library = Library()
    (_, theirs), (_, ours) = pages_of(library, 20), pages_of(library, 12)
    library.refuses.add("cuMemGetAddressRange_v2")
    async with ours.opened(theirs.own) as reason:
        assert reason == "cuMemGetAddressRange_v2 failed with status 201"
    assert not library.opened
    library.refuses.clear()
    wrong = {
        "7 parts of 40 bytes": replace(theirs.own, num_parts=7),
        "6 parts of 48 bytes": replace(theirs.own, part_bytes=48),
        "a handle of 3 bytes": replace(theirs.own, handle=b"abc"),
        "after the end of their allocation": replace(theirs.own, num_blocks=21),
    }
    for words, pages in wrong.items():
        async with ours.opened(pages) as reason:
            assert words in reason
        assert not library.opened, "what is of no use keeps no memory"


async def test_cancelled_copy_keeps_its_memory_open() -> None:
    library = Library()
    (_, theirs), (_, ours) = pages_of(library, 20), pages_of(library, 12)
    async with ours.opened(theirs.own), ours.opened(theirs.own):
        ours.acquire(theirs.own)  # on the device's thread
    await ours.close()
    assert len(library.opened) == 1
    ours.copy(PeerBlocks(theirs.own, BLOCKS), TARGETS, 0)
    await asyncio.to_thread(ours.release, theirs.own)
    assert not library.opened
    with pytest.raises(PeerMemoryError, match="not open any more"):
        ours.acquire(theirs.own)  # an order that was still to come


def test_a_gpu_whose_memory_cannot_be_shared() -> None:
    library = Library()
    whole, _ = pages_of(library, 20)
    library.refuses.add("cuIpcGetMemHandle")
    with pytest.raises(PeerMemoryError, match="cuIpcGetMemHandle failed with status 201"):
        PeerPages(whole, peer_driver.PeerDriver(library))
    assert PeerPages.of(whole, lambda: peer_driver.PeerDriver.load("libnobody.so.1")) is None


class SharedMemory(Memory):
    """A worker whose pages can be shared or sent."""

    def __init__(self, peers: PeerPages) -> None:
        super().__init__()
        self.peers, self.filled, self.leaves = peers, [], False

    async def wait_for_pages(self, epoch: int, after_step: int, blocks: U32) -> None:
        assert epoch == EPOCH
        self.filled.append((after_step, blocks.tolist()))

    def check_epoch(self, _epoch: int) -> None:
        if self.leaves:
            raise FailedPrecondition("epoch: this worker is in another")


@asynccontextmanager
async def both(
    library: Library, bounds: FetchBounds = grpc_transport.BOUNDS, serving_bounds: ServingBounds = page_service.BOUNDS
):
    (_, theirs), (_, ours) = pages_of(library, NUM_BLOCKS), pages_of(library, 12)
    memory = SharedMemory(theirs)
    transport = GrpcTransport(Dialler(), PIECE_BYTES, peers=ours, bounds=bounds)
    async with serving(service(memory, bounds=serving_bounds)) as address:
        yield memory, transport, wanted(address, *BLOCKS.tolist())
    await transport.close()


async def test_worker_on_the_same_host_shares_its_pages() -> None:
    library = Library()
    async with both(library) as (memory, transport, order):
        assert await took(transport, order) == ["shared"]
        assert memory.filled == [(3, BLOCKS.tolist())]
        assert not memory.asked


async def took(transport: GrpcTransport, order: WantedPages) -> list[str]:
    """Receives all pages; returns how each batch arrived."""
    kinds = []
    async with aclosing(transport.fetch(order)) as arrivals:
        async for arrived in arrivals:
            kinds.append(kind_of(arrived))
    return kinds


def kind_of(arrived: FetchedPages) -> str:
    if isinstance(arrived.content, PeerBlocks):
        assert arrived.content.blocks.tolist() == BLOCKS.tolist()
        return "shared"
    return "parts"


async def test_pages_of_an_ended_epoch_are_rejected() -> None:
    async with both(Library()) as (memory, transport, order):
        memory.leaves = True
        with pytest.raises(Unavailable, match="epoch: this worker is in another"):
            await took(transport, order)


async def test_unreachable_pages_are_sent_in_parts() -> None:
    library = Library()
    async with both(library) as (memory, transport, order):
        library.refuses.add("cuIpcOpenMemHandle_v2")
        assert await took(transport, order) == ["parts", "parts"]
        library.refuses.clear()
        assert await took(transport, order) == ["parts", "parts"]
        assert len(memory.filled) == 1


async def test_pages_out_of_reach_are_tried_again_after_a_while() -> None:
    """Another worker may have the address by then, or the driver may work again."""
    library = Library()
    async with both(library, FetchBounds(unreachable_retry_s=0.0)) as (_, transport, order):
        library.refuses.add("cuIpcOpenMemHandle_v2")
        assert await took(transport, order) == ["parts", "parts"]
        library.refuses.clear()
        assert await took(transport, order) == ["shared"]
        assert transport.unreachable_until == {}


async def test_missing_confirmation_is_reported() -> None:
    """The request itself has arrived."""
    offered = both(Library(), serving_bounds=ServingBounds(taken_timeout_s=0.2))
    async with offered as (_, transport, order), transport.connections.connected(order.source.address) as connection:
        call = kv_transfer_pb2_grpc.KVTransferServiceStub(connection.channel).Fetch()
        await transport.send_request(call, order, transport.peers)
        assert (await call.read()).HasField("shared")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert ended.value.details() == "no confirmation that the shared pages were taken within 0.2 s"


async def test_missing_request_is_reported() -> None:
    offered = both(Library(), serving_bounds=ServingBounds(request_timeout_s=0.2))
    async with offered as (_, transport, order), transport.connections.connected(order.source.address) as connection:
        call = kv_transfer_pb2_grpc.KVTransferServiceStub(connection.channel).Fetch()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert ended.value.details() == "no request was received within 0.2 s"


async def test_another_host_gets_parts() -> None:
    async with both(Library()) as (memory, transport, order):
        memory.peers.host = b"another"
        assert await took(transport, order) == ["parts", "parts"]


@pytest.mark.parametrize(
    ("change", "after", "words"),
    [
        ({"num_blocks": 19}, [], "a has 19 blocks, and no block 19"),
        ({}, [pb.FetchResponse()], "a sent more than the location of its pages"),
    ],
    ids=["too few blocks", "something behind"],
)
async def test_wrong_shared_pages_are_detected(
    change: dict[str, int], after: list[pb.FetchResponse], words: str
) -> None:
    library = Library()
    (_, theirs), (_, ours) = pages_of(library, NUM_BLOCKS), pages_of(library, 12)
    shared = pb.FetchResponse(shared=replace(theirs.own, **change).to_proto())
    transport = GrpcTransport(Dialler(), PIECE_BYTES, peers=ours)
    async with serving(Liar(shared, *after, hangs=True)) as address:
        with pytest.raises(PageMismatch, match=words):
            await took(transport, wanted(address, *BLOCKS.tolist()))
    await transport.close()


async def test_unrequested_shared_pages_are_rejected() -> None:
    _, theirs = pages_of(Library(), NUM_BLOCKS)
    transport = GrpcTransport(Dialler(), PIECE_BYTES)
    async with serving(Liar(pb.FetchResponse(shared=theirs.own.to_proto()))) as address:
        with pytest.raises(PageMismatch, match="sent shared, expected bytes of pages"):
            await took(transport, wanted(address, 1))
    await transport.close()


async def test_worker_silent_after_sharing_times_out() -> None:
    library = Library()
    (_, theirs), (_, ours) = pages_of(library, NUM_BLOCKS), pages_of(library, 12)
    transport = GrpcTransport(Dialler(), PIECE_BYTES, peers=ours, bounds=FetchBounds(next_part_timeout_s=0.5))
    async with serving(Liar(pb.FetchResponse(shared=theirs.own.to_proto()), hangs=True)) as address:
        with pytest.raises(Unavailable, match="did not send its pages in time"):
            await took(transport, wanted(address, *BLOCKS.tolist()))
    await transport.close()
