"""Download of weights that a scheduler forwards as a stream, or of the description of a trainer's broadcast."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from quire.services.worker.models.loading.weight_spool import WeightSpool
from quire.shared.errors import Unavailable
from quire.shared.pb.worker.v1 import worker_pb2 as pb


async def fetch(call: Any, worker_id: str, order: pb.StageWeights, spool: WeightSpool) -> None:
    """Downloads one stream into `spool` and sets `order.spooled` to the stored file's path, or `order.broadcast` if the
    stream describes a trainer's broadcast. `call`: a FetchWeights call after its handshake. Raises Unavailable when the
    stream ends early, and the spool's QuireError for invalid pieces."""
    with spool.open_stream() as spooling:
        try:
            await call.write(
                pb.FetchWeightsRequest(fetch=pb.FetchWeights(worker_id=worker_id, stream_id=order.stream_id))
            )
            while isinstance(message := await call.read(), pb.FetchWeightsResponse):
                if await asyncio.to_thread(spooling.append, message.piece):
                    if (expected := spooling.expected) is not None:
                        order.broadcast.CopyFrom(expected)
                    else:
                        order.spooled = str(spooling.keep())
                    return
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the stream of weights broke off: {error.details()}") from None
        except asyncio.InvalidStateError:  # a write after the call ended
            raise Unavailable("the stream of weights broke off") from None
        raise Unavailable("the stream of weights ended before its last message")
