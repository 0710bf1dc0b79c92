"""Pages over real gRPC: they arrive unchanged, and wrong ones are detected."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from os import _exit
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from quire.services.worker.kv_transfer import grpc_transport, page_service
from quire.services.worker.kv_transfer.checksums import checksums
from quire.services.worker.kv_transfer.grpc_transport import SERVICE_NAME, FetchBounds, GrpcTransport
from quire.services.worker.kv_transfer.page_service import PageService, ServingBounds
from quire.services.worker.kv_transfer.transport import PageMismatch, WantedPages
from quire.shared import columns
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition, Unauthenticated, Unavailable
from quire.shared.kv.kv_source import KVSource
from quire.shared.metrics.worker import WorkerMetrics
from quire.shared.pb.worker.v1 import kv_transfer_pb2 as pb
from quire.shared.pb.worker.v1 import kv_transfer_pb2_grpc
from quire.shared.rpc import channel
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import Dialler, HandshakeAcceptor
from quire.shared.security.secret_file import SecretFile
from tests.waiting import eventually

EPOCH = 7
LAYOUT = b"l" * 32
PAGE_BYTES = 300_001  # parts end anywhere in pages
NUM_BLOCKS = 20
PIECE_BYTES = 4 * PAGE_BYTES


class Memory:
    """Blocks of a worker without a model."""

    page_layout = LAYOUT
    blocks_per_piece = 4
    peers = None

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pages = rng.integers(0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=np.uint8)
        self.asked: list[tuple[int, list[int]]] = []

    async def read_pages(self, epoch: int, after_step: int, blocks: U32) -> torch.Tensor:
        if epoch != EPOCH:
            raise FailedPrecondition(f"epoch: this worker is in {EPOCH}, not in {epoch}")
        self.asked.append((after_step, blocks.tolist()))
        return torch.from_numpy(self.pages[blocks])


def wanted(address: str, *blocks: int) -> WantedPages:
    ids = np.array(blocks or range(1, 12), dtype=np.uint32)
    hashes = [bytes([block]) * 32 for block in ids.tolist()]
    return WantedPages(KVSource("a", address, EPOCH), 3, LAYOUT, ids, hashes, PAGE_BYTES)


@asynccontextmanager
async def serving(servicer: Any, door: HandshakeAcceptor | None = None) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0, (SERVICE_NAME,))
    kv_transfer_pb2_grpc.add_KVTransferServiceServicer_to_server(servicer, server.methods)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    if door is not None:
        door.address = address
    yield address
    await server.stop(0)


async def fetch(
    order: WantedPages, dialler: Dialler | None = None, bounds: FetchBounds = grpc_transport.BOUNDS
) -> np.ndarray:
    transport, pages = GrpcTransport(dialler or Dialler(), PIECE_BYTES, bounds=bounds), []
    try:
        async with aclosing(transport.fetch(order)) as arrivals:
            async for arrived in arrivals:
                assert arrived.first == sum(map(len, pages))
                pages.append(arrived.content.numpy())
    finally:
        await transport.close()
    return np.concatenate(pages)


def service(
    memory: Memory, door: HandshakeAcceptor | None = None, bounds: ServingBounds = page_service.BOUNDS
) -> PageService:
    made = PageService(door or HandshakeAcceptor(None, "worker a"), WorkerMetrics(CollectorRegistry()), bounds)
    made.serve(memory, NUM_BLOCKS)
    return made


async def test_pages_arrive_unchanged_in_pieces() -> None:
    memory = Memory()
    async with serving(service(memory)) as address:
        order = wanted(address, *range(11, 0, -1))
        assert np.array_equal(await fetch(order), memory.pages[order.blocks])
    assert memory.asked == [(3, [11, 10, 9, 8]), (3, [7, 6, 5, 4]), (3, [3, 2, 1])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": b"m" * 32}, "layout: the caller's blocks differ from this worker's"),
        ({"source": KVSource("a", "", EPOCH + 1)}, "epoch: this worker is in 7, not in 8"),
        ({"blocks": np.array([NUM_BLOCKS], dtype=np.uint32)}, "block_ids: 1 ids, of which some are outside 1..19"),
        ({"hashes": []}, "block_hashes: 0 bytes for 1 blocks"),
    ],
)
async def test_invalid_requests_are_refused(change: dict[str, Any], words: str) -> None:
    async with serving(service(Memory())) as address:
        order = replace(wanted(address, 1), **change)
        order = replace(order, source=replace(order.source, address=address))
        with pytest.raises(Unavailable, match=words):
            await fetch(order)


async def test_a_worker_that_is_not_built_yet_has_no_pages() -> None:
    early = PageService(HandshakeAcceptor(None, "worker a"), WorkerMetrics(CollectorRegistry()))
    async with serving(early) as address:
        with pytest.raises(Unavailable, match="does not serve pages"):
            await fetch(wanted(address))


async def test_pages_require_the_secret_on_both_sides(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    right, wrong = (SecretFile(str(tmp_path / name), "cluster_secret_file") for name in ("right", "wrong"))
    door, memory = HandshakeAcceptor(right, "worker a"), Memory()
    async with serving(service(memory, door), door) as address:
        order = wanted(address, 1)
        assert np.array_equal(await fetch(order, Dialler("worker b", secret=right)), memory.pages[order.blocks])
        with pytest.raises(Unauthenticated, match="does not know the cluster secret"):
            await fetch(order, Dialler("worker b", secret=wrong))
        with pytest.raises(Unavailable, match="requires proof of its cluster secret"):
            await fetch(order)


class Liar(kv_transfer_pb2_grpc.KVTransferServiceServicer):
    """A server that sends scripted messages."""

    def __init__(self, *parts: pb.FetchResponse, hangs: bool = False) -> None:
        self._parts, self._hangs = parts, hangs

    async def Fetch(self, _requests: object, context: Any) -> None:
        await context.read()
        for part in self._parts:
            await context.write(part)
        if self._hangs:
            await asyncio.Event().wait()


PAGES = np.arange(2 * PAGE_BYTES, dtype=np.uint32).astype(np.uint8).reshape(2, PAGE_BYTES)
HASHES = [bytes([block]) * 32 for block in (1, 2)]


def part(data: bytes, checksums: U32 | None = None) -> pb.FetchResponse:
    return pb.FetchResponse(part=pb.PagePart(data=data, checksums=b"" if checksums is None else checksums.tobytes()))


def checksum_column(hashes: list[bytes] = HASHES, layout: bytes = LAYOUT) -> U32:
    return checksums(layout, hashes, PAGES)


LIES: dict[str, tuple[Callable[[], list[pb.FetchResponse]], str]] = {
    "another page": (
        lambda: [part(PAGES.tobytes(), checksum_column(HASHES[::-1]))],
        "page 0 of a does not match its checksum",
    ),
    "another layout": (
        lambda: [part(PAGES.tobytes(), checksum_column(layout=b"m" * 32))],
        "page 0 of a does not match",
    ),
    "a bit": (
        lambda: [part(PAGES.tobytes()[:-1] + b"\x01", checksum_column())],
        "page 1 of a does not match its checksum",
    ),
    "too short": (lambda: [part(PAGES.tobytes()[:-1], checksum_column())], "a sent 600001 bytes for 2 pages of 300001"),
    "too long": (lambda: [part(PAGES.tobytes() + b"x", checksum_column())], "a sent more than 2 pages"),
    "no checksums": (lambda: [part(PAGES.tobytes())], "a sent 0 checksums for 2 pages"),
    "too many checksums": (lambda: [part(b"x", np.zeros(3, dtype=np.uint32))], "more checksums than pages"),
    "half a checksum": (lambda: [pb.FetchResponse(part=pb.PagePart(data=b"x", checksums=b"12"))], "invalid checksums"),
    "nothing": (list, "a sent 0 bytes for 2 pages"),
    "empty parts": (lambda: [part(b"")], "expected bytes of pages"),
    "something else": (lambda: [pb.FetchResponse()], "a sent None, expected bytes of pages"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_wrong_responses_are_detected(lie: str) -> None:
    parts, words = LIES[lie]
    async with serving(Liar(*parts())) as address:
        with pytest.raises(PageMismatch, match=words):
            await fetch(wanted(address, 1, 2))


async def test_the_truth_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The correct response, of which the wrong ones are variations."""
    async with serving(Liar(part(PAGES.tobytes(), checksum_column()))) as address:
        assert np.array_equal(await fetch(wanted(address, 1, 2)), PAGES)


@pytest.mark.parametrize("parts", [[], [part(b"x")]], ids=["at once", "in the middle"])
async def test_a_worker_that_falls_silent_is_given_up(parts: list[pb.FetchResponse]) -> None:
    bounds = FetchBounds(first_part_timeout_s=1.0, next_part_timeout_s=1.0)
    async with serving(Liar(*parts, hangs=True)) as address:
        with pytest.raises(Unavailable, match="did not send its pages in time"):
            await fetch(wanted(address, 1, 2), bounds=bounds)


async def test_a_worker_that_is_not_there() -> None:
    async with serving(Liar()) as address:
        pass
    with pytest.raises(Unavailable, match=r"a at 127\.0\.0\.1"):
        await fetch(wanted(address, 1))


class Dies(kv_transfer_pb2_grpc.KVTransferServiceServicer):
    """A worker whose process ends after the first bytes of a page."""

    async def Fetch(self, _requests: object, context: Any) -> None:
        await context.read()
        await context.write(part(PAGES.tobytes()[:100]))
        _exit(1)


async def die_in_the_middle() -> None:
    """Serves one fetch and dies."""
    async with serving(Dies()) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


async def test_a_worker_that_is_killed_in_the_middle_of_a_fetch() -> None:
    program = f"import asyncio, {__name__} as own; asyncio.run(own.die_in_the_middle())"
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert killed.stdout is not None
    address = (await killed.stdout.readline()).decode().strip()
    with pytest.raises(Unavailable, match=r"a at 127\.0\.0\.1"):
        await fetch(wanted(address, 1, 2))
    assert await killed.wait() == 1


class RefusesOne(kv_transfer_pb2_grpc.KVTransferServiceServicer):
    """A server of two calls that refuses block 9 in the middle of the call for block 1."""

    def __init__(self) -> None:
        self.in_the_middle, self.goes_on = asyncio.Event(), asyncio.Event()

    async def Fetch(self, _requests: object, context: Any) -> None:
        message = await context.read()
        if columns.u32(message.pages.block_ids).tolist() == [9]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "block_ids: forgotten")
        data = PAGES.tobytes()
        await context.write(part(data[:100]))
        self.in_the_middle.set()
        await self.goes_on.wait()
        await context.write(part(data[100:], checksum_column()))


async def every(order: WantedPages, transport: GrpcTransport) -> np.ndarray:
    async with aclosing(transport.fetch(order)) as arrivals:
        return np.concatenate([arrived.content.numpy() async for arrived in arrivals])


async def test_a_fetch_that_is_refused_disturbs_no_other_from_the_same_worker() -> None:
    """Calls to a worker share a connection; a cancelled connection would leave other orders unanswered."""
    servicer, transport = RefusesOne(), GrpcTransport(Dialler(), PIECE_BYTES)
    async with serving(servicer) as address:
        other = asyncio.create_task(every(wanted(address, 1, 2), transport))
        await servicer.in_the_middle.wait()
        with pytest.raises(Unavailable, match="forgotten"):
            await every(wanted(address, 9), transport)
        servicer.goes_on.set()
        async with asyncio.timeout(60):
            (ended,) = await asyncio.gather(other, return_exceptions=True)
        assert isinstance(ended, np.ndarray), repr(ended)
        assert np.array_equal(ended, PAGES)
        await transport.close()


async def test_a_call_that_ends_on_this_side_is_an_error_like_others() -> None:
    servicer, transport = RefusesOne(), GrpcTransport(Dialler(), PIECE_BYTES)
    async with serving(servicer) as address:
        fetching = asyncio.create_task(every(wanted(address, 1, 2), transport))
        await servicer.in_the_middle.wait()
        await transport.close()
        async with asyncio.timeout(60):
            (ended,) = await asyncio.gather(fetching, return_exceptions=True)
        assert isinstance(ended, Unavailable), repr(ended)


async def test_a_call_that_ends_while_its_request_does_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC raises a special error for it, not the call's status."""

    async def ends_meanwhile(call: Any) -> None:
        call.cancel()
        await call._cython_call.send_receive_close()

    monkeypatch.setattr(grpc.aio._call.StreamStreamCall, "done_writing", ends_meanwhile)
    transport = GrpcTransport(Dialler(), PIECE_BYTES)
    async with serving(RefusesOne()) as address:
        with pytest.raises(Unavailable, match="ended while the request was sent"):
            await every(wanted(address, 1, 2), transport)
        await transport.close()


async def test_evicted_connections_do_not_end_running_fetches() -> None:
    servicer, transport = RefusesOne(), GrpcTransport(Dialler(), PIECE_BYTES, bounds=FetchBounds(max_channels=1))
    async with serving(servicer) as address, serving(Liar(part(PAGES.tobytes(), checksum_column()))) as elsewhere:
        other = asyncio.create_task(every(wanted(address, 1, 2), transport))
        await servicer.in_the_middle.wait()
        assert np.array_equal(await every(wanted(elsewhere, 1, 2), transport), PAGES)
        servicer.goes_on.set()
        async with asyncio.timeout(60):
            (ended,) = await asyncio.gather(other, return_exceptions=True)
        assert isinstance(ended, np.ndarray), repr(ended)
        await transport.close()


async def test_a_caller_that_reads_nothing_gives_its_turn_to_the_next() -> None:
    """A worker whose device hangs keeps its process and connection alive."""

    class Patient(Memory):
        """Memory that blocks the reader of block 9; others get more pages than fit in transit."""

        async def read_pages(self, epoch: int, after_step: int, blocks: U32) -> torch.Tensor:
            pages = await super().read_pages(epoch, after_step, blocks)
            if blocks.tolist() != [9]:
                return torch.zeros((len(blocks), 8 << 20), dtype=torch.uint8)
            serviced.bounds = ServingBounds(max_served=1, taken_timeout_s=60.0)
            return pages

    memory = Patient()
    serviced = service(memory, bounds=ServingBounds(max_served=1, taken_timeout_s=0.2))
    async with serving(serviced) as address, channel.connect(address) as idle:
        order = wanted(address)
        call = kv_transfer_pb2_grpc.KVTransferServiceStub(idle).Fetch()
        ids, hashes = columns.u32_bytes(order.blocks.tolist()), b"".join(order.hashes)
        request = pb.PageRequest(epoch=EPOCH, layout=LAYOUT, block_ids=ids, block_hashes=hashes)
        await call.write(pb.FetchRequest(pages=request))
        await eventually(lambda: memory.asked)
        async with asyncio.timeout(20):  # less than the other side waits for its first part
            assert np.array_equal(await fetch(wanted(address, 9)), memory.pages[9:10])
        call.cancel()
