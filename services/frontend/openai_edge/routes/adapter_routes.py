"""Routes of POST /v1/load_lora_adapter and /v1/unload_lora_adapter for operators, with vLLM's bodies and answers."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response

from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.http.router import Router
from quire.services.frontend.openai_edge.body.bodies import LoadAdapterBody, UnloadAdapterBody
from quire.services.frontend.operations.adapter_operator import AdapterOperator
from quire.shared.pb.admin.v1 import admin_pb2 as pb


class AdapterRoutes:
    """Adapter routes; http/middleware/guards.py (OperatorGuard) checks the caller."""

    def __init__(self, adapters: AdapterOperator, bounds: BodyReader) -> None:
        self._adapters = adapters
        self.router = Router(tags=["adapters"], route_class=bounds.route(at_once=False))
        self.router.add_api_route(
            "/v1/load_lora_adapter", self.load, methods=["POST"], response_class=PlainTextResponse
        )
        self.router.add_api_route(
            "/v1/unload_lora_adapter", self.unload, methods=["POST"], response_class=PlainTextResponse
        )

    async def load(self, body: LoadAdapterBody) -> Response:
        request = pb.LoadAdapterRequest(name=body.lora_name, path=body.lora_path, replace=body.load_inplace)
        await self._adapters.load(request)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, body: UnloadAdapterBody) -> Response:
        await self._adapters.unload(pb.UnloadAdapterRequest(name=body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
