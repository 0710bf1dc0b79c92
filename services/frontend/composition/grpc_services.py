"""What the gRPC port offers: Quire's own services, and what clients of other servers speak."""

from __future__ import annotations

from quire.services.frontend.composition.core import FrontendCore
from quire.services.frontend.composition.door import Door
from quire.services.frontend.composition.grpc_port import GrpcPort
from quire.services.frontend.composition.health import FrontendHealth
from quire.services.frontend.composition.served_model import ServedModel
from quire.services.frontend.grpc_edge.services import admin_service, inference_service
from quire.services.frontend.grpc_edge.services.batch_service import BatchService
from quire.services.frontend.grpc_edge.services.file_service import FileService
from quire.services.frontend.grpc_edge.services.resumable import ResumableCalls
from quire.services.frontend.kserve_edge import service as open_inference
from quire.services.frontend.offline.work import OfflineWork
from quire.services.frontend.operations.operated_adapters import OperatedAdapters
from quire.services.frontend.vllm_edge import service as vllm_engine
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.dialects import open_inference_pb2_grpc, vllm_engine_pb2_grpc
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.process.lifecycle import Shutdown
from quire.shared.rpc.admin_port import AdminPort
from quire.shared.settings.frontend import FrontendSettings


class GrpcServices:
    """Owns the operators' port; the others are on the port of clients."""

    def __init__(
        self,
        settings: FrontendSettings,
        port: GrpcPort,
        model: ServedModel,
        door: Door,
        core: FrontendCore,
        *,
        health: FrontendHealth,
        offline: OfflineWork,
        shutdown: Shutdown,
    ) -> None:
        server = port.server.methods
        self.inference = _inference(settings.name, model, door, core)
        self.operators = _operators(settings.name, port.address, door, core, shutdown)
        self.admin = AdminPort(settings, self.operators, port.server.port)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, server)
        parts = (offline, door.metrics, door.calls)
        batch_pb2_grpc.add_FileServiceServicer_to_server(FileService(*parts), server)
        batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchService(*parts), server)
        tensors = _open_inference(model, door, core, health)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(tensors, server)
        engine = _vllm_engine(model, door, core, health)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)


def _inference(name: str, model: ServedModel, door: Door, core: FrontendCore) -> inference_service.InferenceService:
    return inference_service.InferenceService(
        core.generator,
        model.processor,
        model.tokenizer,
        core.catalogue,
        resumable=ResumableCalls(core.streams, model.tokenizer.defaults),
        metrics=door.metrics,
        calls=door.calls,
        name=name,
    )


def _operators(
    name: str, address: str, door: Door, core: FrontendCore, shutdown: Shutdown
) -> admin_service.FrontendAdminService:
    status = admin_service.OwnStatus(name, address, door.admission, core.client, shutdown=shutdown, calls=door.calls)
    adapters = OperatedAdapters(core.admins, core.client)
    return admin_service.FrontendAdminService(
        status, core.admins, shutdown, door.metrics, door.calls, adapters=adapters
    )


def _open_inference(
    model: ServedModel, door: Door, core: FrontendCore, health: FrontendHealth
) -> open_inference.OpenInferenceService:
    return open_inference.OpenInferenceService(
        core.generator,
        model.tokenizer,
        core.catalogue,
        is_serving=health.is_serving,
        is_alive=health.is_alive,
        room=door.room,
        limits=door.limits,
        metrics=door.metrics,
        calls=door.calls,
    )


def _vllm_engine(
    model: ServedModel, door: Door, core: FrontendCore, health: FrontendHealth
) -> vllm_engine.VllmEngineService:
    return vllm_engine.VllmEngineService(
        core.generator,
        model.tokenizer,
        core.catalogue,
        vllm_engine.ModelCard.of(model.config),
        is_serving=health.is_serving,
        load=core.load,
        admission=door.admission,
        metrics=door.metrics,
        calls=door.calls,
    )
