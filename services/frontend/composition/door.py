"""What a call passes on its way in: its connection, its key, its size, its place. The same for all edges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.frontend.access.access import Access
from services.frontend.bounds.large_bodies import LargeBodies
from services.frontend.bounds.messages import REQUESTS
from services.frontend.bounds.room import Room
from services.frontend.calls.admission import CallAdmission
from services.frontend.calls.calls import Calls
from services.frontend.grpc_edge.bounded_messages import BoundedMessages
from services.frontend.grpc_edge.door import GrpcDoor
from services.frontend.grpc_edge.errors import Refusals
from services.frontend.http.body import BodyBounds
from services.frontend.http.connections import Connections, descriptors
from services.frontend.http.decoded_body import BodyDecoders
from services.frontend.http.unknown_fields import UnknownFields
from shared.metrics.frontend import FrontendMetrics
from shared.settings.frontend import FrontendSettings
from shared.tracing import open_traces


class Door:
    """Owns the places of calls, the connections' counts, the traces, and what reads large bodies."""

    def __init__(
        self, settings: FrontendSettings, metrics: FrontendMetrics, access: Access, room: Callable[[], Room]
    ) -> None:
        self.metrics = metrics
        self.access = access
        self.room = room
        self.limits = settings.request_limits
        self.connections = Connections(settings.connection_limits, descriptors(), metrics)
        self._large = LargeBodies(self.limits, room)
        self.admission = CallAdmission(
            settings.max_inflight_requests,
            settings.max_queued_tokens,
            settings.retry_after_ms,
            metrics,
            is_shared=lambda: access.is_shared,
        )
        self._traces = open_traces(settings)
        self.calls = Calls(self.admission, access, metrics.calls, self._traces)
        self.refused = Refusals(metrics, self.calls, REQUESTS)
        self.grpc = GrpcDoor(self.admission, self.refused, access.tenant_of_metadata)
        self.messages = BoundedMessages(self.limits, self._large, self.calls, metrics)
        unknown = UnknownFields(metrics.count_unknown_field, strict=settings.strict_request_fields)
        self.decoders = BodyDecoders()
        self.bodies = BodyBounds(self.limits, self._large, unknown)

    def look_ahead(self) -> None:
        """Starts what the first large body would else wait for."""
        self._large.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._traces.close)
        self._large.close()
        self.decoders.close()
