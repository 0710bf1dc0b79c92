"""The gRPC port for clients. It is bound before the sessions with schedulers, which are given its address."""

from __future__ import annotations

from quire.services.frontend.composition.ingress import Ingress
from quire.services.frontend.grpc_edge import connections
from quire.services.frontend.grpc_edge.services import batch_service, file_service, inference_service
from quire.services.frontend.kserve_edge import service as open_inference
from quire.services.frontend.vllm_edge import service as vllm_engine
from quire.shared.rpc.guard import CallGuard
from quire.shared.rpc.server import Server
from quire.shared.settings.frontend import FrontendSettings

SERVICES = (
    inference_service.SERVICE_NAME,
    file_service.SERVICE_NAME,
    batch_service.SERVICE_NAME,
    open_inference.SERVICE_NAME,
    vllm_engine.SERVICE_NAME,
)


class GrpcPort:
    """Owns the gRPC server and its limit on connections per address."""

    def __init__(self, settings: FrontendSettings, ingress: Ingress) -> None:
        self.server = Server(
            settings.host,
            settings.grpc_port,
            SERVICES,
            share_port=settings.share_ports,
            max_receive_bytes=settings.max_request_bytes,
            interceptors=[CallGuard(ingress.access.rejection, ingress.refusals), ingress.grpc, ingress.messages],
            tls=settings.client_tls,
            tls_setting="client_tls",
            more_options=connections.options(ingress.connections),
            max_streams=ingress.connections.limits.grpc_streams,
            first_message_s=ingress.connections.limits.header_s,
        )
        self.watch = connections.AddressLimiter(
            self.server.port,
            ingress.connections.max_grpc_per_address,
            ingress.metrics.closed_connections["too_many"].inc,
        )
        self.address = settings.reachable(self.server.port)
