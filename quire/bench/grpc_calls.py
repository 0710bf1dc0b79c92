"""The load client's gRPC half. Messages stay bytes until the load is over, so that reading them disturbs nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import grpc.aio

from quire.bench.timing import Received, Timing
from quire.bench.workloads import Item
from quire.params import SamplingParams, StructuredOutput
from quire.requests import Options, generate_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.rpc.channel import connect

METHOD = "/quire.inference.v1.InferenceService/Generate"


class GrpcCaller:
    """Spreads its calls over some connections, because several frontends behind one port share connections."""

    def __init__(self, address: str, temperature: float, *, final_only: bool, connections: int) -> None:
        self._temperature = temperature
        self._final_only = final_only
        self._channels = [connect(address) for _ in range(connections)]
        self._stubs: cycle[Any] = cycle([channel.unary_stream(METHOD) for channel in self._channels])

    def body(self, item: Item) -> bytes:
        params = SamplingParams(temperature=self._temperature, max_tokens=item.num_output, ignore_eos=True)
        if item.json_schema:
            params = replace(params, structured_output=StructuredOutput(json=item.json_schema))
        request = generate_request(item.prompt, params, Options(final_only=self._final_only))
        return bytes(request.SerializeToString())

    async def call(self, body: bytes) -> tuple[Timing, Received]:
        received: Received = []
        timing = Timing(time.monotonic())
        try:
            async for message in next(self._stubs)(body):
                received.append((time.monotonic(), message))
        except grpc.aio.AioRpcError as error:
            timing.error = f"{error.code().name}: {error.details()}"
        timing.ended = time.monotonic()
        return timing, received

    def settle(self, timing: Timing, received: Received) -> None:
        for at, message in received:
            count = len(pb.GenerateResponse.FromString(message).token_ids)
            if count:
                timing.arrivals.append(at)
                timing.num_tokens += count

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
