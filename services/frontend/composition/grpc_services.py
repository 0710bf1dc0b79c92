"""The services on the gRPC port: Quire's own, and those of other servers' clients."""

from __future__ import annotations

from quire.services.frontend.composition.core import FrontendCore
from quire.services.frontend.composition.grpc_port import GrpcPort
from quire.services.frontend.composition.health import FrontendHealth
from quire.services.frontend.composition.ingress import Ingress
from quire.services.frontend.composition.served_model import ServedModel
from quire.services.frontend.grpc_edge.services import admin_service, inference_service
from quire.services.frontend.grpc_edge.services.batch_service import BatchService
from quire.services.frontend.grpc_edge.services.file_service import FileService
from quire.services.frontend.grpc_edge.services.resumable import ResumableCalls
from quire.services.frontend.grpc_edge.services.transcriptions import TranscriptionCalls
from quire.services.frontend.kserve_edge import service as open_inference
from quire.services.frontend.offline.operations import OfflineOperations
from quire.services.frontend.operations.adapter_operator import AdapterOperator
from quire.services.frontend.vllm_edge import service as vllm_engine
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.dialects import open_inference_pb2_grpc, vllm_engine_pb2_grpc
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.process.lifecycle import Shutdown
from quire.shared.rpc.admin_port import AdminPort
from quire.shared.settings.frontend import FrontendSettings


class GrpcServices:
    """Registers the services on the client port and owns the operators' port."""

    def __init__(
        self,
        settings: FrontendSettings,
        port: GrpcPort,
        model: ServedModel,
        ingress: Ingress,
        core: FrontendCore,
        *,
        health: FrontendHealth,
        offline: OfflineOperations,
        shutdown: Shutdown,
        stalled_upload_s: float,
    ) -> None:
        """Builds the services, registers those for clients on `port`, and prepares the operators' port."""
        server = port.server.methods
        self.inference = _inference(settings.name, model, ingress, core, stalled_upload_s)
        self.operators = _operators(settings.name, port.address, ingress, core, shutdown)
        self.admin = AdminPort(settings, self.operators, port.server.port)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)
        parts = (offline, ingress.metrics, ingress.calls)
        batch_pb2_grpc.add_FileServiceServicer_to_server(FileService(*parts, stalled_upload_s), server)
        batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchService(*parts), server)
        tensors = _open_inference(model, ingress, core, health)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(tensors, server)
        engine = _vllm_engine(model, ingress, core, health)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)


def _inference(
    name: str, model: ServedModel, ingress: Ingress, core: FrontendCore, stalled_upload_s: float
) -> inference_service.InferenceService:
    """Returns Quire's own gRPC inference service over the core. `name`: the name of this frontend."""
    return inference_service.InferenceService(
        core.generator,
        model.processor,
        model.tokenizer,
        core.catalogue,
        resumable=ResumableCalls(core.streams, model.tokenizer.defaults),
        transcriptions=TranscriptionCalls(core.transcription, core.catalogue, stalled_upload_s),
        metrics=ingress.metrics,
        calls=ingress.calls,
        name=name,
    )


def _operators(
    name: str, address: str, ingress: Ingress, core: FrontendCore, shutdown: Shutdown
) -> admin_service.FrontendAdminService:
    """Returns the gRPC service for operators: status, adapters, weights, shutdown."""
    status = admin_service.FrontendStatus(
        name, address, ingress.admission, core.client, shutdown=shutdown, calls=ingress.calls
    )
    adapters = AdapterOperator(core.admins, core.client)
    return admin_service.FrontendAdminService(
        status, core.admins, shutdown, ingress.metrics, ingress.calls, adapters=adapters
    )


def _open_inference(
    model: ServedModel, ingress: Ingress, core: FrontendCore, health: FrontendHealth
) -> open_inference.OpenInferenceService:
    """Returns the gRPC service of KServe's Open Inference Protocol."""
    return open_inference.OpenInferenceService(
        core.generator,
        model.tokenizer,
        core.catalogue,
        is_serving=health.is_serving,
        is_alive=health.is_alive,
        prompt_limit=ingress.prompt_limit,
        limits=ingress.limits,
        metrics=ingress.metrics,
        calls=ingress.calls,
    )


def _vllm_engine(
    model: ServedModel, ingress: Ingress, core: FrontendCore, health: FrontendHealth
) -> vllm_engine.VllmEngineService:
    """Returns the gRPC service that stands in for vLLM's engine."""
    return vllm_engine.VllmEngineService(
        core.generator,
        model.tokenizer,
        core.catalogue,
        vllm_engine.ModelCard.of(model.config),
        is_serving=health.is_serving,
        load=core.cluster_load,
        admission=ingress.admission,
        metrics=ingress.metrics,
        calls=ingress.calls,
    )
