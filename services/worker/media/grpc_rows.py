"""Fetches rows of media items from encode workers (quire/worker/v1/media_rows.proto). Sizes, times and checksums are
checked; the caller checks what the rows are for."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from quire.services.worker.media.download import Download, DownloadBounds
from quire.services.worker.step.fetched_item import Rows
from quire.shared.errors import Unavailable
from quire.shared.pb.worker.v1 import media_rows_pb2 as pb
from quire.shared.pb.worker.v1 import media_rows_pb2_grpc, worker_pb2
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.connection_cache import ConnectionCache
from quire.shared.rpc.trust import Dialler

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MediaRowsService"].full_name

Call = grpc.aio.StreamStreamCall[pb.FetchRowsRequest, pb.FetchRowsResponse]


# 16,384 rows of 8,192 numbers with three layers of deepstack; the rows are kept, so that nothing is computed first
BOUNDS = DownloadBounds(max_bytes=1 << 30, first_part_timeout_s=5.0)


class GrpcRows:
    """RowSource over gRPC, mutually authenticated if there is a cluster secret."""

    def __init__(self, dialler: Dialler, layout: bytes, bounds: DownloadBounds = BOUNDS) -> None:
        """`layout`: digest of what rows depend on (Encoder.layout); workers with another one refuse."""
        self._dialler, self._layout, self._bounds = dialler, layout, bounds
        self._connections = ConnectionCache(dialler)

    async def fetch(self, identifier: bytes, num_rows: int, source: worker_pb2.RowsSource) -> Rows:
        """Returns the rows of an item, uint8 [num_rows, bytes of a row]. Raises Unavailable, also for another number of
        rows than `num_rows`, and Unauthenticated."""
        worker = f"{source.worker_id} at {source.address}"
        request = pb.RowsRequest(epoch=source.epoch, layout=self._layout, identifier=identifier)
        async with self._connections.connected(source.address) as connection:
            call: Call = media_rows_pb2_grpc.MediaRowsServiceStub(connection.channel).FetchRows()
            download = Download(call, self._bounds, worker, "rows")
            try:
                async with asyncio.timeout(self._bounds.first_part_timeout_s):
                    await self._request(call, request, source.address)
                    head: pb.RowsHead = await download.head()
                self._check(head, num_rows, worker)
                data = await download.receive(head.num_rows * head.row_bytes, head.checksum)
                return data.reshape(num_rows, head.row_bytes)
            except TimeoutError:
                self._connections.evict(source.address, connection)
                raise Unavailable(f"{worker} did not send the rows in time") from None
            except grpc.aio.AioRpcError as error:
                self._connections.evict(source.address, connection)
                raise Unavailable(f"{worker}: {error.details()}") from None
            except (asyncio.InvalidStateError, grpc.aio.InternalError):  # the call ended before its request was sent
                raise Unavailable(f"the call to {worker} ended while the request was sent") from None
            except asyncio.CancelledError:
                if is_cancel_requested():
                    raise
                raise Unavailable(f"the call to {worker} was cancelled on this side") from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Closes all connections, which cancels their calls."""
        await self._connections.close()

    async def _request(self, call: Call, request: pb.RowsRequest, address: str) -> None:
        """Authenticates the call and asks for rows."""
        await self._dialler.handshake(call, pb.FetchRowsRequest, SERVICE_NAME, address, known=False)
        await call.write(pb.FetchRowsRequest(rows=request))
        await call.done_writing()

    def _check(self, head: pb.RowsHead, num_rows: int, worker: str) -> None:
        """Raises Unavailable for another number of rows than `num_rows`, and for no or too many bytes."""
        size, most = head.num_rows * head.row_bytes, self._bounds.max_bytes
        if head.num_rows != num_rows or not 0 < size <= most:
            text = f"{head.num_rows} rows of {head.row_bytes} bytes, not {num_rows} rows of at most {most} bytes"
            raise Unavailable(f"{worker} announced {text}")
