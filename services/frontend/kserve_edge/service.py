"""The gRPC service inference.GRPCInferenceService of the open inference protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.grpc_edge.errors import Context, abort, call_context
from quire.services.frontend.http.headers import TENANT
from quire.services.frontend.kserve_edge import tensors
from quire.services.frontend.kserve_edge.format import TensorWriter
from quire.services.frontend.kserve_edge.inference_call import (
    OpenInferenceCall,
    ReceivedInference,
    check_version,
    parse_inference,
    to_request,
)
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument, NotFound, QuireError
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.dialects import open_inference_pb2 as pb
from quire.shared.pb.dialects import open_inference_pb2_grpc
from quire.shared.settings.request_limits import RequestLimits
from quire.shared.version import VERSION

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
MAX_CONCURRENT_REQUESTS = 128  # per stream; the next request is read when one of them has ended
FINAL = "triton_final_response"

Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class _Reply:
    """Reply to one request of a stream; it ends exactly once, even if a later step fails."""

    def __init__(self, message: pb.ModelInferRequest, write: Write) -> None:
        self._message = message
        self._write = write
        self._has_ended = False

    async def write(self, response: pb.ModelInferResponse, *, is_last: bool) -> None:
        """Writes a response and notes whether it was the request's last one."""
        response.parameters[FINAL].bool_param = is_last
        await self._write(pb.ModelStreamInferResponse(infer_response=response))
        self._has_ended = is_last

    async def fail(self, _: Context, error: QuireError) -> None:
        """Writes the error as the request's last response, unless it has ended; the stream's other requests
        continue."""
        if not self._has_ended:
            response = pb.ModelInferResponse(model_name=self._message.model_name, id=self._message.id)
            response.parameters[FINAL].bool_param = True
            await self._write(pb.ModelStreamInferResponse(error_message=error.message, infer_response=response))


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """KServe's gRPC API: converts tensors to requests and results to tensors; the generator does the work."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        catalogue: Catalogue,
        *,
        is_serving: Callable[[], bool],
        is_alive: Callable[[], bool],
        prompt_limit: Callable[[], PromptLimit],
        limits: RequestLimits,
        metrics: FrontendMetrics,
        calls: Calls,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self._is_serving = is_serving
        self._is_alive = is_alive
        self._prompt_limit = prompt_limit
        self._limits = limits
        self._metrics = metrics
        self._calls = calls

    async def ServerLive(self, message: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        async with call_context("ServerLive", context, self._metrics, self._calls):
            return pb.ServerLiveResponse(live=self._is_alive())

    async def ServerReady(self, message: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        async with call_context("ServerReady", context, self._metrics, self._calls):
            return pb.ServerReadyResponse(ready=self._is_serving())

    async def ModelReady(self, message: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        async with call_context("ModelReady", context, self._metrics, self._calls):
            return pb.ModelReadyResponse(ready=is_ready(self._catalogue, message.name, message.version))

    async def ServerMetadata(self, message: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        async with call_context("ServerMetadata", context, self._metrics, self._calls):
            return pb.ServerMetadataResponse(name=tensors.PLATFORM, version=VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(self, message: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Returns the input and output tensors of a model. Raises NotFound for an unknown name or version."""
        async with call_context("ModelMetadata", context, self._metrics, self._calls):
            name = self._catalogue.entry(message.name).name
            check_version(message.version)
            return tensors.metadata(name)

    async def ModelInfer(self, message: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Returns the answer in one piece, when all samples have ended. Raises InvalidArgument for a request that asks
        to stream."""
        headers = _headers(context)
        async with call_context("ModelInfer", context, self._metrics, self._calls) as call:
            await call.admit()
            inference = self._parse(message)
            if inference.stream:
                raise InvalidArgument("stream=true requires ModelStreamInfer", field=tensors.STREAM)
            request = to_request(inference, headers, self._tokenizer.defaults)
            answers = self._writer(inference)
            async with self._generator.start(request, call) as generation:
                return self._response(message, answers.tensors(await generation.collect(), generation), request)

    async def ModelStreamInfer(self, messages: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Answers the requests of a stream concurrently. A failed request gets its own error; an unreadable message
        ends the call after the other requests are answered."""
        writing, places = asyncio.Lock(), asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        failure: QuireError | None = None

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(response)

        async with asyncio.TaskGroup() as group:
            try:
                async for message in messages:
                    await places.acquire()
                    one = group.create_task(self._answer(message, context, write))
                    one.add_done_callback(lambda _: places.release())
            except QuireError as error:
                failure = error
        if failure is not None:
            await abort(context, failure)

    async def _answer(self, message: pb.ModelInferRequest, context: Context, write: Write) -> None:
        """Answers one request of a stream, in pieces if it asks for that; an error becomes its last response."""
        reply = _Reply(message, write)
        headers = _headers(context)
        async with call_context("ModelStreamInfer", context, self._metrics, self._calls, end=reply.fail) as call:
            await call.admit()
            inference = self._parse(message)
            request = to_request(inference, headers, self._tokenizer.defaults)
            answers = self._writer(inference)
            async with self._generator.start(request, call) as generation:
                if not inference.stream:
                    deltas = await generation.collect()
                    outputs = answers.tensors(deltas, generation)
                    await reply.write(self._response(message, outputs, request), is_last=True)
                    return
                async for deltas in generation:
                    outputs = answers.tensors(deltas, generation)
                    await reply.write(self._response(message, outputs, request), is_last=answers.is_last)

    def _parse(self, message: pb.ModelInferRequest) -> OpenInferenceCall:
        """Validates a message and its tensors. Raises InvalidArgument, NotFound."""
        call = ReceivedInference(
            message.model_name,
            message.model_version,
            message.id,
            inputs=tensors.read_inputs(message),
            parameters={name: _value(parameter) for name, parameter in message.parameters.items()},
            requested_outputs=[output.name for output in message.outputs],
        )
        return parse_inference(call, self._limits, self._prompt_limit())

    def _writer(self, call: OpenInferenceCall) -> TensorWriter:
        return TensorWriter(call, TokenTexts(self._tokenizer, as_ids=False))

    def _response(
        self, message: pb.ModelInferRequest, outputs: list[tensors.Tensor], request: Request
    ) -> pb.ModelInferResponse:
        """Returns the message with the outputs; as raw bytes if the inputs were sent so."""
        response = pb.ModelInferResponse(
            model_name=self._catalogue.served_name(request.model),
            model_version=tensors.VERSION_OF_MODELS,
            id=message.id,
        )
        tensors.write_outputs(response, outputs, is_raw=bool(message.raw_input_contents))
        return response


EXTENSIONS = ("generate",)


def is_ready(catalogue: Catalogue, name: str, version: str) -> bool:
    """Whether the model is known in this version and a worker serves it; never raises NotFound."""
    try:
        check_version(version)
        return catalogue.entry(name).ready
    except NotFound:
        return False


def _value(parameter: pb.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _headers(context: Context) -> CallHeaders:
    """Returns what HTTP sends as headers: tenant, deadline and arrival; the request id is a field of the message."""
    metadata = dict(context.invocation_metadata() or ())
    arrival_s = asyncio.get_running_loop().time()
    return CallHeaders(None, str(metadata.get(TENANT, "")), context.time_remaining(), arrival_s)
