"""/v2: the open inference protocol over HTTP."""

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
NOT_OFFERED = ("config", "stats", "trace/setting", "load", "unload")  # behind a model's name: extensions of Triton
ONE, ONES_VERSION = "/{name:path}", "/{name:path}/versions/{version}"


class OpenInferenceRoutes:
    """Bodies to requests, requests to answers."""

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
        for one in (ONES_VERSION, ONE):  # the longer first
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
        """Who this is."""
        return {"name": tensors.PLATFORM, "version": VERSION, "extensions": [*EXTENSIONS, binary.EXTENSION]}

    async def live(self) -> dict[str, bool]:
        """200 unless a restart would help."""
        if not self._is_alive():
            raise Unavailable("the sessions with schedulers stand still")
        return {"live": True}

    async def ready(self) -> dict[str, bool]:
        """200 while requests can be answered."""
        if not self._is_serving():
            raise Unavailable("no scheduler session is open, or this frontend is draining")
        return {"ready": True}

    async def model_ready(self, name: str, version: str = "") -> dict[str, Any]:
        """200 while the model can be asked."""
        entry = self._catalogue.entry(name)
        check_version(version)
        if not entry.ready:
            raise Unavailable(f"{name} is not ready")
        return {"name": entry.name, "ready": True}

    async def model(self, name: str, version: str = "") -> dict[str, Any]:
        """Which tensors it takes and gives."""
        self._check_extension(name)
        entry = self._catalogue.entry(name)
        check_version(version)
        told = json_format.MessageToDict(tensors.metadata(entry.name))
        for tensor in (*told["inputs"], *told["outputs"]):
            tensor["shape"] = [int(size) for size in tensor["shape"]]  # protobuf writes 64 bits as text
        return told

    def _check_extension(self, path: str) -> None:
        """Raises NotFound for what other servers have behind a model's name."""
        for extension in NOT_OFFERED:
            name = path.removesuffix(f"/{extension}")
            if name != path and any(name == entry.name for entry in self._catalogue.entries()):
                has = ", ".join((*EXTENSIONS, binary.EXTENSION))
                raise NotFound(f"{PREFIX}{name}/{extension} is not offered; extensions of this server: {has}")

    async def infer(self, body: InferBody, http: Request, name: str, version: str = "") -> Response:
        """Texts as tensors, in the JSON or as bytes behind it."""
        call = parse_inference(
            body.infer(name, version, BinaryTail(binary_part(http))), self._limits, self._prompt_limit()
        )
        if call.stream:
            raise InvalidArgument("stream needs /generate_stream, or gRPC", field=tensors.STREAM)
        behind = body.binary_outputs()
        answer_format = InferFormat(call, self._texts, self._called(call), behind)
        if behind:
            return BinaryAnswer(self._generator, self._request(call, http), answer_format)
        return self._answer(call, answer_format, http)

    async def generate(self, body: TritonGenerateBody, http: Request, name: str, version: str = "") -> Response:
        """Texts as fields."""
        return self._generate(body.infer(name, version, stream=False), http)

    async def generate_stream(self, body: TritonGenerateBody, http: Request, name: str, version: str = "") -> Response:
        """The same in pieces, as server-sent events."""
        return self._generate(body.infer(name, version, stream=True), http)

    def _generate(self, infer: ReceivedInference, http: Request) -> Response:
        call = parse_inference(infer, self._limits, self._prompt_limit())
        return self._answer(call, KserveGenerateFormat(call, self._texts, self._called(call)), http)

    def _answer(self, call: OpenInferenceCall, answer_format: InferFormat, http: Request) -> Response:
        return GenerationResponse(self._generator, self._request(call, http), answer_format, stream=call.stream)

    def _request(self, call: OpenInferenceCall, http: Request) -> Asking:
        return to_request(call, headers.read(http), self._tokenizer.defaults)

    def _called(self, call: OpenInferenceCall) -> str:
        return self._catalogue.entry(call.model).name

    @property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer, as_ids=False)
