"""Routes under /v2: the open inference protocol over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from google.protobuf import json_format
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.body import binary_part
from quire.services.frontend.http.dialect_route import dialect_route
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.http.text_errors import ERRORS
from quire.services.frontend.kserve_edge import binary, tensors
from quire.services.frontend.kserve_edge.binary import BinaryTail
from quire.services.frontend.kserve_edge.bodies import InferBody, TritonGenerateBody
from quire.services.frontend.kserve_edge.inference_call import (
    OpenInferenceCall,
    ReceivedInference,
    check_version,
    parse_inference,
    to_request,
)
from quire.services.frontend.kserve_edge.json_format import BinaryAnswer, InferFormat, KserveGenerateFormat
from quire.services.frontend.kserve_edge.service import EXTENSIONS
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.request.request import Request as Asking
from quire.shared.errors import InvalidArgument, NotFound, Unavailable
from quire.shared.version import VERSION

ROOT, PREFIX = "/v2", "/v2/models/"
NOT_OFFERED = ("config", "stats", "trace/setting", "load", "unload")  # Triton's extensions, as path suffixes of a model
ONE, ONES_VERSION = "/{name:path}", "/{name:path}/versions/{version}"


class OpenInferenceRoutes:
    """Routes of KServe's Open Inference Protocol and Triton's generate: converts bodies to requests, and outputs to
    responses."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._limits = context.limits
        self._prompt_limit = context.prompt_limit
        self._is_serving = context.is_serving
        self._is_alive = context.is_alive
        worded = dialect_route(context.bounds, ERRORS)
        self.router = Router(tags=["open inference"], route_class=worded)
        self.router.add_api_route("/v2", self.server, methods=["GET"])
        self.router.add_api_route("/v2/health/live", self.live, methods=["GET"])
        self.router.add_api_route("/v2/health/ready", self.ready, methods=["GET"])
        models = Router(
            tags=["open inference"],
            prefix=PREFIX.rstrip("/"),
            route_class=worded,
        )
        for one in (ONES_VERSION, ONE):  # the longer template first
            models.add_api_route(
                f"{one}/infer",
                self.infer,
                methods=["POST"],
                response_class=Response,
                route_class_override=dialect_route(context.bounds, ERRORS, json_bytes=binary.json_bytes),
            )
            models.add_api_route(f"{one}/generate", self.generate, methods=["POST"], response_class=Response)
            models.add_api_route(
                f"{one}/generate_stream", self.generate_stream, methods=["POST"], response_class=Response
            )
            models.add_api_route(f"{one}/ready", self.model_ready, methods=["GET"])
            models.add_api_route(one, self.model, methods=["GET"])
        self.router.add(models)

    async def server(self) -> dict[str, Any]:
        """Returns the server's name, version and extensions."""
        return {"name": tensors.PLATFORM, "version": VERSION, "extensions": [*EXTENSIONS, binary.EXTENSION]}

    async def live(self) -> dict[str, bool]:
        """Answers 200 unless a restart of this process would help. Raises Unavailable."""
        if not self._is_alive():
            raise Unavailable("the sessions with schedulers make no progress")
        return {"live": True}

    async def ready(self) -> dict[str, bool]:
        """Answers 200 while a scheduler session is open and the frontend is not draining. Raises Unavailable."""
        if not self._is_serving():
            raise Unavailable("no scheduler session is open, or this frontend is draining")
        return {"ready": True}

    async def model_ready(self, name: str, version: str = "") -> dict[str, Any]:
        """Answers 200 while a worker serves the model. Raises NotFound, Unavailable."""
        entry = self._catalogue.entry(name)
        check_version(version)
        if not entry.ready:
            raise Unavailable(f"{name} is not ready")
        return {"name": entry.name, "ready": True}

    async def model(self, name: str, version: str = "") -> dict[str, Any]:
        """Returns the names, datatypes and shapes of the model's input and output tensors. Raises NotFound for an
        unknown model or version."""
        self._check_extension(name)
        entry = self._catalogue.entry(name)
        check_version(version)
        document = json_format.MessageToDict(tensors.metadata(entry.name))
        for tensor in (*document["inputs"], *document["outputs"]):
            tensor["shape"] = [
                int(size) for size in tensor["shape"]
            ]  # protobuf's JSON writes 64-bit integers as strings
        return document

    def _check_extension(self, path: str) -> None:
        """Raises NotFound that lists the extensions, if the path names a model and an extension of other servers."""
        for extension in NOT_OFFERED:
            name = path.removesuffix(f"/{extension}")
            if name != path and any(name == entry.name for entry in self._catalogue.entries()):
                available = ", ".join((*EXTENSIONS, binary.EXTENSION))
                raise NotFound(f"{PREFIX}{name}/{extension} is not supported; extensions of this server: {available}")

    async def infer(self, body: InferBody, http: Request, name: str, version: str = "") -> Response:
        """Answers a text given as a tensor, in the JSON or as bytes after it; outputs are bytes as well if the body
        asks for that. Raises InvalidArgument for a request that asks to stream."""
        call = parse_inference(
            body.infer(name, version, BinaryTail(binary_part(http))), self._limits, self._prompt_limit()
        )
        if call.stream:
            raise InvalidArgument("stream=true requires /generate_stream, or gRPC", field=tensors.STREAM)
        binary_outputs = body.binary_outputs()
        answer_format = InferFormat(call, self._texts, self._served_name(call), binary_outputs)
        if binary_outputs:
            return BinaryAnswer(self._generator, self._request(call, http), answer_format)
        return self._answer(call, answer_format, http)

    async def generate(self, body: TritonGenerateBody, http: Request, name: str, version: str = "") -> Response:
        """Answers a text given as a field."""
        return self._generate(body.infer(name, version, stream=False), http)

    async def generate_stream(self, body: TritonGenerateBody, http: Request, name: str, version: str = "") -> Response:
        """Answers a text given as a field, as server-sent events."""
        return self._generate(body.infer(name, version, stream=True), http)

    def _generate(self, infer: ReceivedInference, http: Request) -> Response:
        call = parse_inference(infer, self._limits, self._prompt_limit())
        return self._answer(call, KserveGenerateFormat(call, self._texts, self._served_name(call)), http)

    def _answer(self, call: OpenInferenceCall, answer_format: InferFormat, http: Request) -> Response:
        return GenerationResponse(self._generator, self._request(call, http), answer_format, stream=call.stream)

    def _request(self, call: OpenInferenceCall, http: Request) -> Asking:
        return to_request(call, headers.read(http), self._tokenizer.defaults)

    def _served_name(self, call: OpenInferenceCall) -> str:
        return self._catalogue.entry(call.model).name

    @property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer, as_ids=False)
