"""Routes for reinforcement learning loops, for operators, under vLLM's and SGLang's names.

/pause, /resume, /is_paused, /sleep, /wake_up, /is_sleeping, /update_weights_from_disk, and for a trainer's process
group /init_weights_update_group, /update_weights_from_distributed, /destroy_weights_update_group.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.http.router import Router
from quire.services.frontend.operations.scheduler_admins import SchedulerAdmins
from quire.shared.errors import Unimplemented
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHeads, WeightsPiece
from quire.shared.tensor_headers import DEFAULT_GROUP, MAX_HEADERS_PER_PIECE, tensor_headers

MOST_RANKS = 1 << 16
Seconds = Annotated[float, Field(gt=0, le=540)]
Mode = Literal["keep", "abort", "wait"]
Tag = Literal["weights", "kv_cache"]
Clear = Annotated[bool, Query(json_schema_extra={"const": False})]
MODES: dict[str, pb.PauseMode] = {
    "keep": pb.PAUSE_MODE_KEEP,
    "abort": pb.PAUSE_MODE_ABORT,
    "wait": pb.PAUSE_MODE_WAIT,
}


class UpdateWeightsBody(BaseModel):
    """Request body of POST /update_weights_from_disk."""

    model_config = ConfigDict(extra="forbid")

    model_path: str = Field(
        description="folder of the weights on the workers' machines, or relative to their weights_folders"
    )
    weight_version: str = Field("", description="version that answers report for the weights; empty: a number")
    mode: Mode = Field("wait", description="running requests: wait for their ends, keep them, or abort them")
    abort_all_requests: bool = Field(False, description="SGLang's name of mode=abort")


class JoinGroupBody(BaseModel):
    """Request body of POST /init_weights_update_group."""

    model_config = ConfigDict(extra="forbid")

    master_address: str = Field(description="address of the trainer's TCPStore, as workers reach it")
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=MOST_RANKS)] = Field(1, description="the first rank of a worker")
    world_size: Annotated[int, Field(ge=2, le=MOST_RANKS)] = Field(description="ranks of workers, trainer and others")
    group_name: str = Field("", description="empty: weight_update_group")
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: Seconds = Field(120, description="time limit for all ranks to join")


class BroadcastBody(BaseModel):
    """Request body of POST /update_weights_from_distributed."""

    model_config = ConfigDict(extra="forbid")

    names: list[str] = Field(description="names of the tensors in the order of their broadcast")
    dtypes: list[str] = Field(description='as torch calls them: "bfloat16"')
    shapes: list[list[Annotated[int, Field(ge=0, lt=1 << 48)]]]
    group_name: str = Field("", description="empty: weight_update_group")
    weight_version: str = Field("", description="version that answers report for the weights; empty: a number")
    mode: Mode = Field("wait", description="running requests: wait for their ends, keep them, or abort them")
    abort_all_requests: bool = Field(False, description="SGLang's name of mode=abort")
    timeout_s: Seconds = Field(120, description="time limit for all tensors")


class LeaveGroupBody(BaseModel):
    """Request body of POST /destroy_weights_update_group."""

    model_config = ConfigDict(extra="forbid")

    group_name: str = Field("", description="empty: weight_update_group")


class OperationRoutes:
    """Operation routes; http/middleware/guards.py (OperatorGuard) checks the caller."""

    def __init__(
        self,
        schedulers: SchedulerAdmins,
        services: Callable[[], Awaitable[Sequence[pb.ServiceStatus]]],
        bounds: BodyReader,
    ) -> None:
        """Registers the routes. `services` asks for the status of all services of the cluster; `bounds` limits the
        bodies."""
        self._schedulers, self._services = schedulers, services
        self.router = Router(tags=["operations"], own_query=True, route_class=bounds.route(at_once=False))
        for path, call in (
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/sleep", self.sleep),
            ("/wake_up", self.wake_up),
            ("/update_weights_from_disk", self.update_weights),
            ("/init_weights_update_group", self.init_weights_update_group),
            ("/update_weights_from_distributed", self.update_weights_from_distributed),
            ("/destroy_weights_update_group", self.destroy_weights_update_group),
        ):
            self.router.add_api_route(path, call, methods=["POST"])
        self.router.add_api_route("/is_paused", self.is_paused, methods=["GET"])
        self.router.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"])

    async def pause(self, mode: Mode = "keep", clear_cache: Clear = False) -> dict[str, Any]:
        """Pauses generation on all schedulers; `mode` says whether requests in progress are kept, aborted or waited
        for. Returns the counts of kept and aborted sequences; raises Unimplemented for clear_cache."""
        if clear_cache:
            raise Unimplemented(
                "clear_cache is not supported: the prefix cache is cleared when the weights change", field="clear_cache"
            )
        paused = await self._schedulers.pause_generation(pb.PauseGenerationRequest(mode=MODES[mode]))
        return {"status": "paused", "num_kept": paused.num_kept, "num_aborted": paused.num_aborted}

    async def resume(self) -> dict[str, Any]:
        await self._schedulers.resume_generation(pb.ResumeGenerationRequest())
        return {"status": "resumed"}

    async def sleep(self, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "keep") -> dict[str, Any]:
        """Puts all workers to sleep. `mode` says whether requests in progress are kept, aborted or waited for; level
        1 moves weights to host memory, level 2 discards them. Returns the counts of kept and aborted sequences."""
        slept = await self._schedulers.sleep(pb.SleepRequest(level=level, mode=MODES[mode]))
        return {"status": "asleep", "num_kept": slept.num_kept, "num_aborted": slept.num_aborted}

    async def wake_up(self, tags: Annotated[list[Tag] | None, Query()] = None) -> dict[str, Any]:
        """Wakes the weights or KV caches that `tags` name on all workers, all by default; returns what is still
        asleep."""
        woken = await self._schedulers.wake_up(pb.WakeUpRequest(tags=tags or ()))
        return {"status": "asleep" if woken.asleep else "awake", "asleep": list(woken.asleep)}

    async def update_weights(self, body: UpdateWeightsBody) -> dict[str, Any]:
        """Loads a checkpoint from a folder of the workers into all of them, and returns the new version."""
        mode = pb.PAUSE_MODE_ABORT if body.abort_all_requests else MODES[body.mode]
        request = pb.UpdateWeightsRequest(path=body.model_path, weight_version=body.weight_version, mode=mode)
        return _update_result(await self._schedulers.update_weights(request))

    async def init_weights_update_group(self, body: JoinGroupBody) -> dict[str, Any]:
        """Makes all workers join the trainer's process group and returns after all ranks have joined, within
        timeout_s."""
        request = pb.InitWeightsUpdateGroupRequest(
            **body.model_dump(exclude={"timeout_s"}), timeout_ms=round(body.timeout_s * 1000)
        )
        joined = await self._schedulers.init_weights_update_group(request)
        return {"success": True, "message": f"{joined.num_ranks} ranks are in the group"}

    async def update_weights_from_distributed(self, body: BroadcastBody) -> dict[str, Any]:
        """Receives tensors that the trainer broadcasts in the process group on all workers, and returns the new
        version."""
        mode = pb.PAUSE_MODE_ABORT if body.abort_all_requests else MODES[body.mode]
        request = pb.UpdateWeightsRequest(weight_version=body.weight_version, mode=mode)
        return _update_result(await self._schedulers.update_weights(request, _announced(body)))

    async def destroy_weights_update_group(self, body: LeaveGroupBody) -> dict[str, Any]:
        """Makes all workers leave the trainer's process group of that name."""
        await self._schedulers.destroy_weights_update_group(
            pb.DestroyWeightsUpdateGroupRequest(group_name=body.group_name)
        )
        return {"success": True, "message": "no worker is in the group"}

    async def is_paused(self) -> dict[str, bool]:
        return {"is_paused": await self._any(pb.STATE_PAUSED)}

    async def is_sleeping(self) -> dict[str, bool]:
        return {"is_sleeping": await self._any(pb.STATE_ASLEEP)}

    async def _any(self, state: pb.State) -> bool:
        """Returns whether any scheduler is in the state."""
        services = await self._services()
        return any(service.role == pb.ROLE_SCHEDULER and service.state == state for service in services)


def _update_result(updated: pb.UpdateWeightsResponse) -> dict[str, Any]:
    message = f"{updated.num_workers} workers have the weights"
    return {"success": True, "message": message, "weight_version": updated.weight_version}


async def _announced(body: BroadcastBody) -> AsyncIterator[WeightsPiece]:
    """Yields the announcement of a broadcast as pieces of a weights stream: headers, broadcast, end. Raises
    InvalidArgument if names, dtypes and shapes do not match."""
    heads = tensor_headers(body.names, body.dtypes, body.shapes)
    for start in range(0, len(heads), MAX_HEADERS_PER_PIECE):
        yield WeightsPiece(heads=TensorHeads(tensors=heads[start : start + MAX_HEADERS_PER_PIECE]))
    content = BroadcastContent(group_name=body.group_name or DEFAULT_GROUP, timeout_ms=round(body.timeout_s * 1000))
    yield WeightsPiece(broadcast=content)
    yield WeightsPiece(end=b"")
