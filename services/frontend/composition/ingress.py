"""The parts that every call passes before it is processed, for all edges: connection limits, authentication, size
limits, admission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.services.frontend.access.access import Access
from quire.services.frontend.bounds.bodies.large_bodies import LargeBodies
from quire.services.frontend.bounds.messages import REQUESTS
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.grpc_edge.admission_interceptor import AdmissionInterceptor
from quire.services.frontend.grpc_edge.bounded_messages import BoundedMessages
from quire.services.frontend.grpc_edge.errors import RefusalRecorder
from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.services.frontend.http.middleware.decoded_body import BodyDecoders
from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter, descriptors
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.settings.frontend import FrontendSettings
from quire.shared.tracing import open_traces


class Ingress:
    """Owns admission, connection limits, traces, and the process that checks large bodies."""

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        access: Access,
        prompt_limit: Callable[[], PromptLimit],
    ) -> None:
        """Builds the parts that every call passes before the core. `prompt_limit`: limit of one prompt, as known
        now."""
        self.metrics = metrics
        self.access = access
        self.prompt_limit = prompt_limit
        self.limits = settings.request_limits
        self.connections = ConnectionLimiter(settings.connection_limits, descriptors(), metrics)
        self._large = LargeBodies(self.limits, prompt_limit)
        self.admission = CallAdmission(
            settings.max_inflight_requests,
            settings.max_queued_tokens,
            settings.retry_after_ms,
            metrics,
            has_several_tenants=lambda: access.has_several_tenants,
        )
        self._traces = open_traces(settings)
        self.calls = Calls(self.admission, access, metrics.calls, self._traces)
        self.refusals = RefusalRecorder(metrics, self.calls, REQUESTS)
        self.grpc = AdmissionInterceptor(self.admission, self.refusals, access.tenant_from_metadata)
        self.messages = BoundedMessages(self.limits, self._large, self.calls, metrics)
        unknown = UnknownFields(metrics.count_unknown_field, strict=settings.strict_request_fields)
        self.decoders = BodyDecoders()
        self.bodies = BodyReader(self.limits, self._large, unknown)

    def warm_up(self) -> None:
        """Starts the process that checks large bodies, so that the first one need not wait for it."""
        self._large.start()

    async def close(self) -> None:
        """Sends the remaining traces, and ends the checking process and the decoding thread."""
        await asyncio.to_thread(self._traces.close)
        self._large.close()
        self.decoders.close()
