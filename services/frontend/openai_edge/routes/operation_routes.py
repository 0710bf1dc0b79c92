"""What loops of reinforcement learning ask of a server, for operators, under the names that vLLM and SGLang have:
/pause, /resume, /is_paused, /sleep, /wake_up, /is_sleeping, /update_weights_from_disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from services.frontend.grpc_edge.scheduler_admins import SchedulerAdmins
from services.frontend.http.body import BodyBounds
from services.frontend.http.router import Router
from shared.pb.admin.v1 import admin_pb2 as pb

Mode = Literal["keep", "abort", "wait"]
Tag = Literal["weights", "kv_cache"]
MODES: dict[str, pb.PauseMode] = {
    "keep": pb.PAUSE_MODE_KEEP,
    "abort": pb.PAUSE_MODE_ABORT,
    "wait": pb.PAUSE_MODE_WAIT,
}


class UpdateWeightsBody(BaseModel):
    """POST /update_weights_from_disk"""

    model_config = ConfigDict(extra="forbid")

    model_path: str = Field(description="a folder on the machines of the workers, or relative to their weights_folders")
    weight_version: str = Field("", description="what answers are to call the weights; empty: a number")
    mode: Mode = Field("wait", description="requests that are there: wait for their ends, keep them, or abort them")
    abort_all_requests: bool = Field(False, description="SGLang's word for mode abort")


class OperationRoutes:
    """Who may call them is seen to before (http/middleware.py: OperatorGuard)."""

    def __init__(
        self,
        schedulers: SchedulerAdmins,
        services: Callable[[], Awaitable[Sequence[pb.ServiceStatus]]],
        bounds: BodyBounds,
    ) -> None:
        """`services`: of the whole cluster."""
        self._schedulers, self._services = schedulers, services
        self.router = Router(tags=["operations"], route_class=bounds.route(at_once=False))
        for path, call in (
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/sleep", self.sleep),
            ("/wake_up", self.wake_up),
            ("/update_weights_from_disk", self.update_weights),
        ):
            self.router.add_api_route(path, call, methods=["POST"])
        self.router.add_api_route("/is_paused", self.is_paused, methods=["GET"])
        self.router.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"])

    async def pause(self, mode: Mode = "keep") -> dict[str, Any]:
        paused = await self._schedulers.pause_generation(pb.PauseGenerationRequest(mode=MODES[mode]))
        return {"status": "paused", "num_kept": paused.num_kept, "num_aborted": paused.num_aborted}

    async def resume(self) -> dict[str, Any]:
        await self._schedulers.resume_generation(pb.ResumeGenerationRequest())
        return {"status": "resumed"}

    async def sleep(self, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "keep") -> dict[str, Any]:
        slept = await self._schedulers.sleep(pb.SleepRequest(level=level, mode=MODES[mode]))
        return {"status": "asleep", "num_kept": slept.num_kept, "num_aborted": slept.num_aborted}

    async def wake_up(self, tags: Annotated[list[Tag] | None, Query()] = None) -> dict[str, Any]:
        woken = await self._schedulers.wake_up(pb.WakeUpRequest(tags=tags or ()))
        return {"status": "asleep" if woken.asleep else "awake", "asleep": list(woken.asleep)}

    async def update_weights(self, body: UpdateWeightsBody) -> dict[str, Any]:
        mode = pb.PAUSE_MODE_ABORT if body.abort_all_requests else MODES[body.mode]
        request = pb.UpdateWeightsRequest(path=body.model_path, weight_version=body.weight_version, mode=mode)
        updated = await self._schedulers.update_weights(request)
        message = f"{updated.num_workers} workers have the weights"
        return {"success": True, "message": message, "weight_version": updated.weight_version}

    async def is_paused(self) -> dict[str, bool]:
        return {"is_paused": await self._any(pb.STATE_PAUSED)}

    async def is_sleeping(self) -> dict[str, bool]:
        return {"is_sleeping": await self._any(pb.STATE_ASLEEP)}

    async def _any(self, state: pb.State) -> bool:
        """Whether a scheduler is in it."""
        services = await self._services()
        return any(service.role == pb.ROLE_SCHEDULER and service.state == state for service in services)
