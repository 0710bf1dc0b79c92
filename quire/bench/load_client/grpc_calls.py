"""Load client for gRPC. Messages stay bytes until the load has ended, so that parsing does not disturb the
measurement."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import grpc.aio

from quire.bench.load_client.timing import Received, RequestTiming
from quire.bench.workload.workloads import BenchRequest
from quire.params import SamplingParams, StructuredOutput
from quire.requests import RequestOptions, generate_request
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.rpc.channel import connect

METHOD = "/quire.inference.v1.InferenceService/Generate"
ATTEMPTS = 16  # connection attempts per frontend
ASK_TIMEOUT_S = 10.0
FRONTEND_METADATA = "quire-frontend"


class GrpcCaller:
    """Distributes its calls evenly over all frontends that share a port. The kernel distributes connections at
    random: of 16, one of 4 frontends may get 7, whose speed would then determine the result."""

    def __init__(self, address: str, temperature: float, *, final_only: bool, frontends: int) -> None:
        self._address = address
        self._temperature = temperature
        self._final_only = final_only
        self._frontends = frontends
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: cycle[Any] = cycle([])

    async def open(self) -> None:
        """Opens one channel per frontend, by reconnecting until each has been reached or the attempts are used up."""
        by_frontend: dict[str, grpc.aio.Channel] = {}
        for _ in range(ATTEMPTS * self._frontends):
            channel = connect(self._address)
            name = await _name_of(channel) if self._frontends > 1 else ""
            if name in by_frontend:
                await channel.close()
            by_frontend.setdefault(name, channel)
            if not name or len(by_frontend) == self._frontends:
                break
        self._channels = list(by_frontend.values())
        self._stubs = cycle([channel.unary_stream(METHOD) for channel in self._channels])

    def body(self, item: BenchRequest) -> bytes:
        """Serializes the request of a workload's item, with a fixed number of output tokens."""
        params = SamplingParams(temperature=self._temperature, max_tokens=item.num_output, ignore_eos=True)
        if item.json_schema:
            params = replace(params, structured_output=StructuredOutput(json=item.json_schema))
        request = generate_request(item.prompt, params, RequestOptions(final_only=self._final_only, model=item.adapter))
        if item.media is not None:
            item.media.add_to(request)
        return bytes(request.SerializeToString())

    async def call(self, body: bytes) -> tuple[RequestTiming, Received]:
        """Sends a body on the next channel and stores the messages with arrival times, unparsed. A gRPC error is
        stored in the timing and not raised."""
        received: Received = []
        timing = RequestTiming(time.monotonic())
        try:
            async for message in next(self._stubs)(body):
                received.append((time.monotonic(), message))
        except grpc.aio.AioRpcError as error:
            timing.error = f"{error.code().name}: {error.details()}"
        timing.ended = time.monotonic()
        return timing, received

    def settle(self, timing: RequestTiming, received: Received) -> None:
        """Parses the stored messages and adds token counts and arrival times to the timing."""
        for at, message in received:
            count = len(pb.GenerateResponse.FromString(message).token_ids)
            if count:
                timing.arrivals.append(at)
                timing.num_tokens += count

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def _name_of(channel: grpc.aio.Channel) -> str:
    """Returns the name of the frontend at the other end of a channel; empty if it does not report one."""
    call = inference_pb2_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=ASK_TIMEOUT_S)
    try:
        metadata = dict(await call.trailing_metadata())
    except grpc.aio.AioRpcError:
        return ""
    return str(metadata.get(FRONTEND_METADATA, ""))
