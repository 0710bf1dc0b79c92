"""Implements vLLM's gRPC service vllm.grpc.engine.VllmEngine on this cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from quire.services.frontend.access.access import Caller
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generation import Aborted, Generation
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.services.frontend.grpc_edge.requests import arrival_of
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.services.frontend.vllm_edge import requests, responses
from quire.services.frontend.vllm_edge.aborts import AbortRegistry
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.models import encoder_families
from quire.shared.pb.dialects import vllm_engine_pb2 as pb
from quire.shared.pb.dialects import vllm_engine_pb2_grpc
from quire.shared.version import VERSION

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "vllm-grpc"  # by which routers recognize the protocol


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Model properties from the model's folder."""

    type: str
    architectures: tuple[str, ...]
    generates: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelCard:
        """Reads the properties from `config`, the content of config.json."""
        architectures = tuple(map(str, config.get("architectures") or ()))
        reads_only = bool(encoder_families.family_of(config)) or any(map(_classifies, architectures))
        return cls(str(config.get("model_type", "")), architectures, not reads_only)


def _classifies(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Service that converts messages to requests for the generator, and its output to messages."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        catalogue: Catalogue,
        card: ModelCard,
        *,
        is_serving: Callable[[], bool],
        load: Callable[[], Mapping[str, float]],
        admission: CallAdmission,
        metrics: FrontendMetrics,
        calls: Calls,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self._card = card
        self._is_serving = is_serving
        self._load = load
        self._admission = admission
        self._metrics = metrics
        self._calls = calls
        self._aborts = AbortRegistry()
        self._started_s = asyncio.get_running_loop().time()

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> None:
        """Admits the call, converts its message and writes the responses to `context`; errors end the call with
        their gRPC status."""
        arrival = arrival_of(context)
        async with call_context("Generate", context, self._metrics, self._calls) as call:
            await call.admit()
            request = requests.generate_request(message, arrival, self._tokenizer.defaults)
            async with self._generator.start(request, call) as generation:
                await self._stream(generation, call.caller, context, streams=message.stream)

    async def _stream(self, generation: Generation, caller: Caller | None, context: Context, *, streams: bool) -> None:
        """Writes the generation's responses and registers it for Abort meanwhile. If it is aborted, each unfinished
        sample gets a final response instead of an error."""
        unfinished = set(range(generation.request.num_samples))
        try:
            with self._aborts.registered(caller, generation):
                async for deltas in generation:
                    for delta in deltas:
                        for response in responses.generate_responses(delta, generation, streams=streams):
                            await context.write(response)
                        if delta.finish is not None:
                            unfinished.discard(delta.sample)
        except Aborted:
            for sample in sorted(unfinished):
                for response in responses.aborted(sample, generation):
                    await context.write(response)

    async def Embed(self, message: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Admits the call, pools its token ids and returns the vector of float32 values."""
        arrival = arrival_of(context)
        async with call_context("Embed", context, self._metrics, self._calls) as call:
            await call.admit()
            async with self._generator.start(requests.embed_request(message, arrival), call) as generation:
                await generation.collect()
                vector = np.frombuffer(generation.vector(0), "<f4")
                return pb.EmbedResponse(
                    embedding=vector, prompt_tokens=generation.usage.prompt_tokens, embedding_dim=len(vector)
                )

    async def HealthCheck(self, message: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Reports healthy while a scheduler session is open and the frontend does not drain; never fails for being
        unhealthy."""
        async with call_context("HealthCheck", context, self._metrics, self._calls):
            if self._is_serving():
                return pb.HealthCheckResponse(healthy=True)
            return pb.HealthCheckResponse(message="no scheduler session is open, or this frontend is draining")

    async def Abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with call_context("Abort", context, self._metrics, self._calls) as call:
            self._aborts.abort(call.caller, message.request_ids)
            return pb.AbortResponse()

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Returns the properties of the default model; the model's name stands for its paths as well."""
        async with call_context("GetModelInfo", context, self._metrics, self._calls):
            entry = self._catalogue.entry()
            return pb.GetModelInfoResponse(
                model_path=entry.name,
                is_generation=self._card.generates,
                max_context_length=entry.max_model_len,
                vocab_size=entry.vocab_size,
                served_model_name=entry.name,
                tokenizer_path=entry.name,
                model_type=self._card.type,
                architectures=self._card.architectures,
                eos_token_ids=self._tokenizer.eos_ids,
                max_req_input_len=entry.max_model_len,
            )

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Returns the number of admitted samples and the uptime in seconds; data parallelism is not exposed and
        reported as 1."""
        async with call_context("GetServerInfo", context, self._metrics, self._calls):
            return pb.GetServerInfoResponse(
                active_requests=self._admission.num_samples,
                uptime_seconds=asyncio.get_running_loop().time() - self._started_s,
                server_type=SERVER_TYPE,
                data_parallel_size=1,
            )

    async def GetLoads(self, message: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Returns the load of all schedulers as the load of one data-parallel rank; token_usage is the fraction of
        the KV cache in use."""
        async with call_context("GetLoads", context, self._metrics, self._calls):
            load = self._load()
            running, waiting = int(load["num_requests_running"]), int(load["num_requests_waiting"])
            return pb.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=VERSION,
                dp_rank_count=1,
                loads=[
                    pb.SchedulerLoad(
                        num_running_reqs=running,
                        num_waiting_reqs=waiting,
                        num_total_reqs=running + waiting,
                        token_usage=load["kv_cache_usage_perc"],
                    )
                ],
            )
