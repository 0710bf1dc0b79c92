"""Composition root of the frontend: the one place that names concrete classes, and their order of coming and going."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from starlette.types import ASGIApp

from services.frontend.anthropic_edge.routes import MessageRoutes
from services.frontend.bounds.large_bodies import LargeBodies
from services.frontend.bounds.messages import REQUESTS
from services.frontend.bounds.room import Room
from services.frontend.calls.admission import Admission
from services.frontend.calls.calls import Calls
from services.frontend.catalogue import Catalogue
from services.frontend.console.routes import ConsoleRoutes
from services.frontend.generation.generator import Generator
from services.frontend.grpc_edge import admin_service, inference_service
from services.frontend.grpc_edge import connections as grpc_connections
from services.frontend.grpc_edge.bounded_messages import BoundedMessages
from services.frontend.grpc_edge.errors import Refusals
from services.frontend.grpc_edge.operated_adapters import OperatedAdapters
from services.frontend.grpc_edge.resumable import Resumable
from services.frontend.grpc_edge.scheduler_admins import SchedulerAdmins
from services.frontend.http import app
from services.frontend.http.body import BodyBounds
from services.frontend.http.connections import Connections, descriptors
from services.frontend.http.server import HttpServer
from services.frontend.input_processor.processor import InputProcessor
from services.frontend.input_processor.sentence_texts import Reader
from services.frontend.kserve_edge import service as open_inference
from services.frontend.kserve_edge.routes import OpenInferenceRoutes
from services.frontend.loop_delay import watch_loop_delay
from services.frontend.offline.offline import Offline
from services.frontend.ollama_edge.routes import ModelCard, OllamaRoutes
from services.frontend.openai_edge.responses.routes import ResponseRoutes
from services.frontend.openai_edge.responses.store import ResponseStore
from services.frontend.openai_edge.resumable import Resumable as StreamRoutes
from services.frontend.openai_edge.routes.adapter_routes import AdapterRoutes
from services.frontend.openai_edge.routes.generation_routes import GenerationRoutes
from services.frontend.openai_edge.routes.model_routes import ModelRoutes
from services.frontend.openai_edge.routes.operation_routes import OperationRoutes
from services.frontend.openai_edge.routes.pooling_routes import PoolingRoutes
from services.frontend.openai_edge.routes.service_routes import ServiceRoutes
from services.frontend.openai_edge.routes.token_routes import TokenRoutes
from services.frontend.output_processor.answer_formats import AnswerFormats
from services.frontend.scheduler_client.client import SchedulerClient
from services.frontend.scheduler_client.patience import Patience
from services.frontend.sglang_edge.routes import SglangRoutes
from services.frontend.through_redis import ThroughRedis
from services.frontend.tokenizer.tokenizer import Tokenizer
from services.frontend.vllm_edge import service as vllm_engine
from services.frontend.web_edge.codec import Codec
from services.frontend.web_edge.edge import WebEdge
from shared import logs, ports
from shared.metrics.base import Document, Page
from shared.metrics.cluster_load import ClusterLoadCollector
from shared.metrics.frontend import FrontendMetrics
from shared.models import model_identity
from shared.pb.common.v1 import model_pb2
from shared.pb.dialects import open_inference_pb2_grpc, vllm_engine_pb2_grpc
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.pb.scheduler.v1 import scheduler_pb2
from shared.process.lifecycle import Shutdown, announce, first, keep_for_good
from shared.process.liveness import Liveness
from shared.process.supervision import Tasks, restarted, vital
from shared.rpc.admin_port import AdminPort
from shared.rpc.guard import CallGuard
from shared.rpc.server import Server
from shared.rpc.trust import Dialler
from shared.settings.frontend import FrontendSettings
from shared.tracing import open_traces
from shared.version import VERSION

log = logs.logger("frontend")

SERVICES = (inference_service.SERVICE_NAME, open_inference.SERVICE_NAME, vllm_engine.SERVICE_NAME)
ATTEMPT_PATIENCE_S = 60.0  # with one attempt to reach a scheduler, which takes 10 at most
# Threads hold the interpreter's lock for what they give to tokenizers and get from them: with CPython's 5 ms the loop
# would wait so long whenever it has looked for news, which it does several times for a first token.
SWITCH_INTERVAL_S = 5e-4
LAST_WRITES_S = 2.0  # for answers whose request has ended to reach their clients


async def serve(settings: FrontendSettings, shutdown: Shutdown) -> None:
    """Until `shutdown` and the drain that follows it; raises what makes serving impossible."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    for field in ("http_port", "grpc_port"):  # before anything is loaded
        ports.check(settings.host, getattr(settings, field), field, share=settings.share_ports)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    frontend = Frontend(settings, shutdown)
    frontend.look_ahead()
    keep_for_good()
    try:
        await frontend.run()
    finally:
        await frontend.close()


class Frontend:
    """The parts of one frontend process."""

    def __init__(self, settings: FrontendSettings, shutdown: Shutdown) -> None:
        self._settings = settings
        self._shutdown = shutdown
        self._tasks = Tasks()
        self._liveness = Liveness()
        folder = Path(settings.model)
        identity = model_identity.identity(folder, settings.served_model_name)
        config = model_identity.read_config(folder)
        context = config.get("max_position_embeddings", identity.vocab_size)
        self.metrics = FrontendMetrics(identity.name, context)
        self._tokenizer = Tokenizer(folder, settings.tokenizer_threads, settings.chat_template, settings.control_tokens)
        self._redis = ThroughRedis(settings, self.metrics)
        self._access = self._redis.access
        self._connections = Connections(settings.connection_limits, descriptors(), self.metrics)
        self._large = LargeBodies(settings.request_limits, self._room)
        self._admission = Admission(
            settings.max_inflight_requests, settings.max_queued_tokens, settings.retry_after_ms, self.metrics
        )
        self._traces = open_traces(settings)
        self._calls = Calls(self._admission, self._access, self.metrics.calls, self._traces)
        self._refused = Refusals(self.metrics, self._calls, REQUESTS)
        self._bounded = BoundedMessages(settings.request_limits, self._large, self._calls, self.metrics)
        self._grpc = self._new_grpc_server()
        self._grpc_watch = grpc_connections.AddressWatch(
            self._grpc.port,
            self._connections.most_of_one_over_grpc,
            self.metrics.closed_connections["too_many"].inc,
        )
        self.grpc_address = settings.reachable(self._grpc.port)
        hello = scheduler_pb2.FrontendHello(
            frontend_id=settings.name, pid=os.getpid(), address=self.grpc_address, version=VERSION, model=identity
        )
        dialler = Dialler.of(settings)
        self._client = SchedulerClient(
            settings.schedulers,
            hello,
            patience=Patience(settings.unavailable_after_s, settings.worker_start_s),
            retry_after_ms=settings.retry_after_ms,
            metrics=self.metrics,
            dialler=dialler,
        )
        self._admins = SchedulerAdmins(self._client.roster, dialler)
        self._card = ModelCard(str(config.get("model_type", "")), identity.fingerprint)
        self._engine_card = vllm_engine.ModelCard.of(config)
        self._catalogue = Catalogue(identity, lambda: self._client.limits)
        load = ClusterLoadCollector(lambda: self._client.load, lambda: self._catalogue.adapters)
        self.metrics.registry.register(load)
        self._processor = InputProcessor(
            self._tokenizer,
            identity.vocab_size,
            settings.max_prompts_per_request,
            settings.request_limits,
            model_identity.class_names(config),
            reader=Reader.of(folder, config, identity.name, self._tokenizer),
        )
        self._generator = self._new_generator(identity)
        self._streams = self._redis.streams(self._generator, self._calls)
        self._add_grpc_services()
        self._add_grpc_dialects()
        self._http = self._new_http_server()
        self.http_address = settings.reachable(self._http.port)
        self._page = None if settings.metrics_port < 0 else self._new_page(settings.metrics_port)

    def _new_grpc_server(self) -> Server:
        return Server(
            self._settings.host,
            self._settings.grpc_port,
            SERVICES,
            share_port=self._settings.share_ports,
            max_receive_bytes=self._settings.max_request_bytes,
            interceptors=[CallGuard(self._access.check, self._refused), self._bounded],
            tls=self._settings.client_tls,
            tls_setting="client_tls",
            more_options=grpc_connections.options(self._connections),
        )

    def _new_generator(self, identity: model_pb2.ModelIdentity) -> Generator:
        return Generator(
            catalogue=self._catalogue,
            processor=self._processor,
            prefixes=self._redis.look_up(identity, self._client),
            client=self._client,
            tokenizer=self._tokenizer,
            formats=AnswerFormats(
                self._settings.tool_call_parser,
                self._settings.reasoning_parser,
                self._tokenizer,
                auto_tool_choice=self._settings.enable_auto_tool_choice,
            ),
            metrics=self.metrics,
            stream_interval=self._settings.stream_interval,
        )

    def _add_grpc_services(self) -> None:
        self._inference = inference_service.InferenceService(
            self._generator,
            self._processor,
            self._tokenizer,
            self._catalogue,
            resumable=Resumable(self._streams, self._tokenizer.defaults),
            metrics=self.metrics,
            calls=self._calls,
            name=self._settings.name,
        )
        status = admin_service.OwnStatus(
            self._settings.name,
            self.grpc_address,
            self._admission,
            self._client,
            shutdown=self._shutdown,
            calls=self._calls,
        )
        adapters = OperatedAdapters(self._admins, self._client)
        parts = (status, self._admins, self._shutdown, self.metrics, self._calls)
        self._asked = admin_service.AdminService(*parts, adapters=adapters)
        self.admin = AdminPort(self._settings, self._asked, self._grpc.port)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, self._grpc.grpc)

    def _add_grpc_dialects(self) -> None:
        """What clients of other servers speak."""
        tensors = open_inference.OpenInferenceService(
            self._generator,
            self._tokenizer,
            self._catalogue,
            is_serving=self.is_serving,
            is_alive=lambda: self._liveness.is_alive,
            room=self._room,
            limits=self._settings.request_limits,
            metrics=self.metrics,
            calls=self._calls,
        )
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(tensors, self._grpc.grpc)
        engine = vllm_engine.VllmEngineService(
            self._generator,
            self._tokenizer,
            self._catalogue,
            self._engine_card,
            is_serving=self.is_serving,
            load=lambda: self._client.load,
            admission=self._admission,
            metrics=self.metrics,
            calls=self._calls,
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, self._grpc.grpc)

    def _new_http_server(self) -> HttpServer:
        bounds = BodyBounds(self._settings.request_limits, self._large)
        parts = (self._generator, self._processor, self._tokenizer, self._catalogue, bounds)
        resumable = StreamRoutes(self._streams)
        self._offline = Offline(self._settings, self._access, bounds, lambda: self._shutdown.requested)
        routes = (
            GenerationRoutes(*parts, resumable=resumable),
            resumable,
            MessageRoutes(*parts),
            ResponseRoutes(*parts, store=ResponseStore(self._settings.response_store_mb * 2**20), resumable=resumable),
            PoolingRoutes(self._generator, self._processor, self._catalogue, bounds),
            OllamaRoutes(*parts, card=self._card),
            SglangRoutes(self._generator, self._tokenizer, bounds),
            OpenInferenceRoutes(
                self._generator,
                self._tokenizer,
                self._catalogue,
                bounds,
                self._settings.request_limits,
                room=self._room,
                is_serving=self.is_serving,
                is_alive=lambda: self._liveness.is_alive,
            ),
            TokenRoutes(self._processor, self._tokenizer, self._catalogue, bounds),
            ModelRoutes(self._catalogue),
            AdapterRoutes(self._asked.adapters, bounds),
            OperationRoutes(self._asked.schedulers, self._asked.services, bounds),
            self._offline,
            ConsoleRoutes(self._asked.services),
            ServiceRoutes(self.is_serving, lambda: self._liveness.is_alive, self._admission, self._public_metrics),
        )
        settings = self._settings
        face = app.build(
            [part.router for part in routes],
            access=self._access,
            operator=self.admin.check_operator,
            open_paths=settings.open_paths,
            cors_origins=settings.cors_origins,
            root_path=settings.root_path,
            max_request_bytes=settings.max_request_bytes,
            max_file_bytes=settings.batch_file_mb * 2**20,
            admission=self._admission,
            calls=self._calls,
            metrics=self.metrics,
            load=lambda: self._client.load,
            web=self._new_web_edge,
        )
        self._offline.call(face.inner)
        return HttpServer(
            face,
            settings.host,
            settings.http_port,
            share_port=settings.share_ports,
            drain_timeout_s=LAST_WRITES_S,
            tls=settings.client_tls,
            connections=self._connections,
        )

    def _new_web_edge(self, app: ASGIApp) -> WebEdge:
        return WebEdge(
            app,
            self._inference,
            Codec(self._bounded, self._settings.request_limits),
            access=self._access,
            admission=self._admission,
            refused=self._refused,
            max_bytes=self._settings.max_request_bytes,
        )

    @property
    def metrics_address(self) -> str:
        """Of the page that wants no key; empty without one."""
        return "" if self._page is None else f"{self._settings.metrics_host}:{self._page.port}"

    def _public_metrics(self) -> bytes:
        """On the port of clients: who has a key is not told of other tenants."""
        return self.metrics.page(tenants=self._access.is_open)

    def _new_page(self, port: int) -> Page:
        settings = self._settings
        return Page(settings.metrics_host, port, self._own_metrics, settings.tls, share=settings.share_ports)

    def _own_metrics(self, _path: str) -> Document:
        return Document(self.metrics.page(tenants=True))

    def _room(self) -> Room:
        limits = self._client.limits
        return Room(0 if limits is None else limits.max_model_len, self._tokenizer.longest_token)

    def is_serving(self) -> bool:
        return self._client.is_open and self._liveness.is_alive and not self._shutdown.requested

    def look_ahead(self) -> None:
        """Starts what the first large body and the first long conversation would else wait for."""
        self._large.start()
        self._tokenizer.conversations.start()

    async def run(self) -> None:
        await self._grpc.start()
        await self.admin.start()
        serving = vital("the HTTP server", self._http.run(), may_end=lambda: self._shutdown.requested)
        http = self._tasks.start("http", serving)
        await self._http.listening()
        announce(
            "frontend",
            self._settings.name,
            http=self.http_address,
            grpc=self.grpc_address,
            admin=self.admin.address,
            **({"metrics": self.metrics_address} if self.metrics_address else {}),
        )
        self._liveness.watch(self._client.roster.attempts, ATTEMPT_PATIENCE_S)
        background = [
            restarted("liveness", lambda: self._liveness.run(self._tell_alive)),
            vital("the sessions with schedulers", self._client.run()),
            restarted("health", self._report_health),
            restarted("gRPC connections", self._grpc_watch.run, is_needed=False),
            restarted("loop delay", lambda: watch_loop_delay(self.metrics), is_needed=False),
            *self._redis.tasks(),
            *self._streams.tasks(),
            *self._offline.tasks(),
        ]
        await first(http, *background, self._drain_when_asked(http))

    async def _tell_alive(self, is_alive: bool) -> None:
        await self._grpc.set_alive(is_alive)
        await self._grpc.set_serving(self.is_serving())

    async def _report_health(self) -> None:
        while True:
            await self._grpc.set_serving(self.is_serving())
            await self._client.changed()

    async def _drain_when_asked(self, http: asyncio.Task[None]) -> None:
        """Refuses what is new from the signal on, waits for what is under way, then closes the doors."""
        await self._shutdown.wait()
        self._admission.close()
        await self._grpc.set_serving(False)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._admission.idle()
        except TimeoutError:
            log.warning("leaving with work unfinished", samples=self._admission.num_samples)
        await self._grpc.stop(LAST_WRITES_S)
        self._http.stop()
        await http

    async def close(self) -> None:
        await self._grpc.stop(0)
        await self.admin.stop()
        await self._streams.close()
        await self._redis.close()
        if self._page is not None:
            self._page.close()
        await asyncio.to_thread(self._traces.close)
        self._large.close()
        self._processor.close()
        self._tokenizer.close()
