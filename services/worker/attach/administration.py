"""Implementation of AdminService in a worker."""

from __future__ import annotations

from quire.services.worker.attach.status import WorkerStatus
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.admin.v1 import admin_pb2 as pb


class WorkerAdministration:
    """Answers status requests; every other operation raises FailedPrecondition, as the scheduler owns it."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def status(self) -> pb.GetStatusResponse:
        """Returns the status of this worker alone."""
        return pb.GetStatusResponse(services=[self._status.read()])

    async def reset_prefix_cache(self, _request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        raise FailedPrecondition("a worker does not own its prefix cache: ask the scheduler to reset it")

    async def pause_generation(self, _request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        raise FailedPrecondition("a worker runs the steps of its scheduler: ask the scheduler to pause generation")

    async def resume_generation(self, _request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        raise FailedPrecondition("a worker runs the steps of its scheduler: ask the scheduler to resume generation")

    async def update_weights(self, _request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        raise FailedPrecondition("a worker's scheduler controls its weights: ask the scheduler to update them")

    async def init_weights_update_group(
        self, _request: pb.InitWeightsUpdateGroupRequest
    ) -> pb.InitWeightsUpdateGroupResponse:
        raise FailedPrecondition("a worker's scheduler controls its groups: ask the scheduler to initialize one")

    async def destroy_weights_update_group(
        self, _request: pb.DestroyWeightsUpdateGroupRequest
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        raise FailedPrecondition("a worker's scheduler controls its groups: ask the scheduler to destroy one")

    async def sleep(self, _request: pb.SleepRequest) -> pb.SleepResponse:
        raise FailedPrecondition("a worker's scheduler controls sleep: ask the scheduler to put it to sleep")

    async def wake_up(self, _request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        raise FailedPrecondition("a worker's scheduler controls sleep: ask the scheduler to wake it up")

    async def load_adapter(self, _request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        raise FailedPrecondition("a worker's scheduler controls its adapters: ask the scheduler to load one")

    async def unload_adapter(self, _request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        raise FailedPrecondition("a worker's scheduler controls its adapters: ask the scheduler to unload one")

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        raise FailedPrecondition("a worker's scheduler controls its adapters: ask the scheduler to list them")
