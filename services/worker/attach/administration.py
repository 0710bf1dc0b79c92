"""What operators may ask of a worker: about itself only."""

from __future__ import annotations

from quire.services.worker.attach.status import WorkerStatus
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.admin.v1 import admin_pb2 as pb


class WorkerAdministration:
    """Its status; which prefixes are cached is the scheduler's to say."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(services=[self._status.read()])

    async def reset_prefix_cache(self, _request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        raise FailedPrecondition("a worker does not own its prefix cache: ask its scheduler to reset it")

    async def pause_generation(self, _request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        raise FailedPrecondition("a worker runs the steps that its scheduler orders: ask that to pause generation")

    async def resume_generation(self, _request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        raise FailedPrecondition("a worker runs the steps that its scheduler orders: ask that to resume generation")

    async def update_weights(self, _request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        raise FailedPrecondition("a worker has the weights that its scheduler orders: ask that to update them")

    async def init_weights_update_group(
        self, _request: pb.InitWeightsUpdateGroupRequest
    ) -> pb.InitWeightsUpdateGroupResponse:
        raise FailedPrecondition("a worker joins the groups that its scheduler orders: ask that")

    async def destroy_weights_update_group(
        self, _request: pb.DestroyWeightsUpdateGroupRequest
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        raise FailedPrecondition("a worker leaves the groups that its scheduler orders: ask that")

    async def sleep(self, _request: pb.SleepRequest) -> pb.SleepResponse:
        raise FailedPrecondition("a worker sleeps when its scheduler orders it: ask that")

    async def wake_up(self, _request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        raise FailedPrecondition("a worker wakes up when its scheduler orders it: ask that")

    async def load_adapter(self, _request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        raise FailedPrecondition("a worker has the adapters that its scheduler orders: ask that to load one")

    async def unload_adapter(self, _request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        raise FailedPrecondition("a worker has the adapters that its scheduler orders: ask that to unload one")

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        raise FailedPrecondition("a worker has the adapters that its scheduler orders: ask that to list them")
