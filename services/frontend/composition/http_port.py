"""The HTTP port: all HTTP APIs, and gRPC-Web and Connect for browsers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from starlette.types import ASGIApp

from quire.services.frontend.composition import http_app as app
from quire.services.frontend.composition.core import FrontendCore
from quire.services.frontend.composition.dialects import DIALECTS
from quire.services.frontend.composition.grpc_services import GrpcServices
from quire.services.frontend.composition.health import FrontendHealth
from quire.services.frontend.composition.ingress import Ingress
from quire.services.frontend.composition.served_model import ServedModel
from quire.services.frontend.console.routes import ConsoleRoutes
from quire.services.frontend.http.middleware.page_rules import PageRules, is_loopback
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.server.server import HttpServer
from quire.services.frontend.http.serving_context import ModelFacts, ServingContext
from quire.services.frontend.offline.service import OfflineService
from quire.services.frontend.openai_edge.realtime.endpoint import RealtimeEndpoint
from quire.services.frontend.openai_edge.routes.adapter_routes import AdapterRoutes
from quire.services.frontend.openai_edge.routes.operation_routes import OperationRoutes
from quire.services.frontend.openai_edge.routes.service_routes import ServiceRoutes
from quire.services.frontend.openai_edge.routes.transcription_routes import REALTIME
from quire.services.frontend.web_edge.codec import Codec
from quire.services.frontend.web_edge.edge import WebEdge
from quire.shared.logs import logger
from quire.shared.settings.frontend import FrontendSettings

log = logger("http")

LAST_WRITES_S = 2.0  # time for finished answers to be sent before the server stops


class HttpPort:
    """Owns the HTTP server; batch lines are answered through its application as well."""

    def __init__(
        self,
        settings: FrontendSettings,
        model: ServedModel,
        ingress: Ingress,
        core: FrontendCore,
        *,
        services: GrpcServices,
        health: FrontendHealth,
        offline: OfflineService,
    ) -> None:
        """Builds the application and binds the port; run the server to accept calls."""
        self._settings = settings
        self._model = model
        self._ingress = ingress
        self._core = core
        self._services = services
        self._health = health
        self._offline = offline
        self.server = self._new_server()
        self.address = settings.reachable(self.server.port)

    def _new_server(self) -> HttpServer:
        """Builds the application with the routes of all dialects and operators, gives it to the batch service, and
        returns the server that will listen on the HTTP port."""
        settings, ingress, rules = self._settings, self._ingress, self._page_rules()
        application = app.build(
            [*self._apis(), *self._operation()],
            DIALECTS,
            access=ingress.access,
            operator=self._services.admin.check_operator,
            open_paths=settings.open_paths,
            rules=rules,
            root_path=settings.root_path,
            max_request_bytes=settings.max_request_bytes,
            max_file_bytes=settings.batch_file_mb * 2**20,
            decoders=ingress.decoders,
            admission=ingress.admission,
            calls=ingress.calls,
            metrics=ingress.metrics,
            load=self._core.cluster_load,
            sse_keepalive_s=settings.sse_keepalive_s,
            model=self._core.catalogue.name,
            web=lambda application: self._new_web_edge(application, rules),
            sockets=self._sockets(rules),
        )
        self._offline.set_app(application.inner)
        return HttpServer(
            application,
            settings.host,
            settings.http_port,
            share_port=settings.share_ports,
            drain_timeout_s=LAST_WRITES_S,
            tls=settings.client_tls,
            connections=ingress.connections,
        )

    def _sockets(self, rules: PageRules) -> Mapping[str, ASGIApp]:
        """Returns the applications for WebSocket connections, by path; none without a model that transcribes, or the
        library websockets."""
        transcription, ingress = self._core.transcription, self._ingress
        if transcription is None:
            return {}
        if find_spec("websockets") is None:
            log.warning("realtime is not served: run pip install websockets", path=REALTIME)
            return {}
        endpoint = RealtimeEndpoint(
            transcription, self._core.catalogue, ingress.calls, access=ingress.access, rules=rules
        )
        return {REALTIME: endpoint}

    def _apis(self) -> list[Router]:
        """Returns the routes of all dialects."""
        context = self._context()
        return [router for dialect in DIALECTS.all for router in dialect.routers(context)]

    def _context(self) -> ServingContext:
        """Returns the collaborators that the dialects' routes are built with."""
        model, core = self._model, self._core
        return ServingContext(
            generator=core.generator,
            processor=model.processor,
            tokenizer=model.tokenizer,
            catalogue=core.catalogue,
            bounds=self._ingress.bodies,
            limits=self._ingress.limits,
            texts=model.pooling_traits.texts,
            facts=ModelFacts(str(model.config.get("model_type", "")), model.identity.fingerprint),
            streams=core.streams,
            transcription=core.transcription,
            response_store_bytes=self._settings.response_store_mb * 2**20,
            prompt_limit=self._ingress.prompt_limit,
            is_serving=self._health.is_serving,
            is_alive=self._health.is_alive,
        )

    def _operation(self) -> list[Router]:
        """Returns the routes for adapters, operators, batches, the console, probes and metrics."""
        operators, ingress, health = self._services.operators, self._ingress, self._health
        routes = (
            AdapterRoutes(operators.adapters, ingress.bodies),
            OperationRoutes(operators.schedulers, operators.services, ingress.bodies),
            self._offline,
            ConsoleRoutes(operators.services, self._settings.root_path),
            ServiceRoutes(health.is_serving, health.is_alive, ingress.admission, self._public_metrics),
        )
        return [part.router for part in routes]

    def _public_metrics(self) -> bytes:
        """Returns the metrics page for the client port; with API keys it omits other tenants' metrics."""
        return self._ingress.metrics.page(tenants=self._ingress.access.allows_anonymous)

    def _page_rules(self) -> PageRules:
        """Returns the rules for web pages of other origins; warns if an address beyond loopback is open without API
        keys."""
        settings, is_open = self._settings, self._ingress.access.allows_anonymous
        if is_open and not is_loopback(settings.host):
            log.warning(
                "no API keys are configured: every host that reaches this port can use it; set api_keys, or restrict "
                "access to a trusted network",
                host=settings.host,
                port=settings.http_port,
            )
        return PageRules.of(settings, has_keys=not is_open)

    def _new_web_edge(self, application: ASGIApp, rules: PageRules) -> WebEdge:
        """Returns `application` wrapped with the edge that answers gRPC-Web and Connect calls."""
        return WebEdge(
            application,
            self._services.inference,
            Codec(self._ingress.messages, self._ingress.limits),
            access=self._ingress.access,
            rules=rules,
            admission=self._ingress.admission,
            refused=self._ingress.refusals,
            decoders=self._ingress.decoders,
            max_bytes=self._settings.max_request_bytes,
        )
