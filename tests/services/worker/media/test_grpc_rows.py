"""Rows over real gRPC: they arrive unchanged, and a worker that lies, hangs or ends costs one item."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from quire.services.worker.media import grpc_rows
from quire.services.worker.media.download import DownloadBounds
from quire.services.worker.media.grpc_rows import SERVICE_NAME, GrpcRows
from quire.services.worker.media.rows_service import RowsService
from quire.services.worker.step.fetched_item import Rows
from quire.shared.errors import FailedPrecondition, NotFound, Unauthenticated, Unavailable
from quire.shared.pb.worker.v1 import media_rows_pb2 as pb
from quire.shared.pb.worker.v1 import media_rows_pb2_grpc, worker_pb2
from quire.shared.rpc.parts import MAX_PART_BYTES
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import Dialler, HandshakeAcceptor
from quire.shared.security.secret_file import SecretFile

LAYOUT, EPOCH, NAME = b"l" * 32, 7, b"i" * 32
ROWS = np.random.default_rng(1).integers(0, 256, (6, MAX_PART_BYTES // 4), dtype=np.uint8)  # two parts
Context = grpc.aio.ServicerContext


class KeptRows:
    """RowReader of one item."""

    layout = LAYOUT

    async def read_rows(self, epoch: int, identifier: bytes) -> Rows:
        if epoch != EPOCH:
            raise FailedPrecondition(f"epoch: this worker is in epoch {EPOCH}, not {epoch}", field="epoch")
        if identifier != NAME:
            raise NotFound("no such item")
        return ROWS


class LyingService(media_rows_pb2_grpc.MediaRowsServiceServicer):
    """Sends messages that a test gives it; None: it ends without a status."""

    def __init__(self, *messages: pb.FetchRowsResponse, hangs: bool = False) -> None:
        self._messages, self._hangs = messages, hangs

    async def FetchRows(self, _requests: object, context: Context) -> None:
        await context.read()
        for message in self._messages:
            await context.write(message)
        if self._hangs:
            await asyncio.Event().wait()


@asynccontextmanager
async def serving(servicer: media_rows_pb2_grpc.MediaRowsServiceServicer) -> AsyncIterator[worker_pb2.RowsSource]:
    server = Server("127.0.0.1", 0, (SERVICE_NAME,))
    media_rows_pb2_grpc.add_MediaRowsServiceServicer_to_server(servicer, server.methods)
    await server.start()
    yield worker_pb2.RowsSource(worker_id="e0", address=f"127.0.0.1:{server.port}", epoch=EPOCH)
    await server.stop(0)


@asynccontextmanager
async def keeping(acceptor: HandshakeAcceptor | None = None) -> AsyncIterator[worker_pb2.RowsSource]:
    """Serves the rows of one item."""
    acceptor = acceptor or HandshakeAcceptor(None, "worker e0")
    service = RowsService(acceptor)
    service.serve(KeptRows())
    async with serving(service) as source:
        acceptor.address = source.address
        yield source


async def fetched(
    source: worker_pb2.RowsSource,
    *,
    identifier: bytes = NAME,
    num_rows: int = 6,
    layout: bytes = LAYOUT,
    dialler: Dialler | None = None,
    bounds: DownloadBounds = grpc_rows.BOUNDS,
) -> Rows:
    client = GrpcRows(dialler or Dialler(), layout, bounds)
    try:
        return await client.fetch(identifier, num_rows, source)
    finally:
        await client.close()


async def test_rows_arrive_unchanged() -> None:
    async with keeping() as source:
        assert np.array_equal(await fetched(source), ROWS)


async def test_what_the_worker_does_not_have_is_refused() -> None:
    async with keeping() as source:
        with pytest.raises(Unavailable, match="no such item"):
            await fetched(source, identifier=b"x" * 32)
        with pytest.raises(Unavailable, match="the caller's rows differ"):
            await fetched(source, layout=b"m" * 32)
        with pytest.raises(Unavailable, match=r"6 rows of .* not 5 rows"):
            await fetched(source, num_rows=5)
        source.epoch = EPOCH - 1
        with pytest.raises(Unavailable, match="epoch: this worker is in epoch 7, not 6"):
            await fetched(source)


async def test_a_worker_that_is_not_built_yet_serves_nothing() -> None:
    async with serving(RowsService(HandshakeAcceptor(None, "worker e0"))) as source:
        with pytest.raises(Unavailable, match="does not serve rows"):
            await fetched(source)


async def test_a_worker_that_is_gone_costs_one_error() -> None:
    async with keeping() as source:
        pass
    with pytest.raises(Unavailable, match="e0 at 127"):
        await fetched(source)


SMALL = np.arange(12, dtype=np.uint8).reshape(3, 4)
HEAD = pb.FetchRowsResponse(head=pb.RowsHead(num_rows=3, row_bytes=4, checksum=zlib.crc32(SMALL.tobytes())))
PART = pb.FetchRowsResponse(part=SMALL.tobytes())
HUGE = pb.FetchRowsResponse(head=pb.RowsHead(num_rows=3, row_bytes=1 << 30))
LIES: dict[str, tuple[tuple[pb.FetchRowsResponse, ...], str]] = {
    "nothing": ((), "sent nothing instead of the size"),
    "no head": ((PART,), "sent part instead of the size"),
    "two heads": ((HEAD, HEAD), "sent head instead of bytes"),
    "too few bytes": ((HEAD, pb.FetchRowsResponse(part=b"12345")), "sent 5 of 12 bytes"),
    "too many bytes": ((HEAD, PART, PART), "sent 24 of 12 bytes"),
    "an empty part": ((HEAD, pb.FetchRowsResponse(part=b""), PART), "sent 0 of 12 bytes"),
    "other bytes": ((HEAD, pb.FetchRowsResponse(part=b"\0" * 12)), "do not match their checksum"),
    "more than fits": ((HUGE,), "announced 3 rows of 1073741824 bytes"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_worker_that_lies_costs_one_error(lie: str) -> None:
    messages, text = LIES[lie]
    async with serving(LyingService(*messages)) as source:
        with pytest.raises(Unavailable, match=text):
            await fetched(source, num_rows=3)


@pytest.mark.parametrize("messages", [(), (HEAD,)])
async def test_a_worker_that_hangs_costs_the_time_of_a_part(messages: tuple[pb.FetchRowsResponse, ...]) -> None:
    bounds = replace(grpc_rows.BOUNDS, first_part_timeout_s=0.2, next_part_timeout_s=0.2)
    async with serving(LyingService(*messages, hangs=True)) as source:
        with pytest.raises(Unavailable, match="did not send the rows in time"):
            await fetched(source, num_rows=3, bounds=bounds)


async def test_both_sides_prove_the_secret(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    right, wrong = (SecretFile(str(tmp_path / name), "cluster_secret_file") for name in ("right", "wrong"))
    async with keeping(HandshakeAcceptor(right, "worker e0")) as source:
        assert np.array_equal(await fetched(source, dialler=Dialler("worker w", secret=right)), ROWS)
        with pytest.raises(Unauthenticated):
            await fetched(source, dialler=Dialler("worker w", secret=wrong))
        with pytest.raises(Unavailable):
            await fetched(source, dialler=Dialler("worker w"))
