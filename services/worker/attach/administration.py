"""What operators may ask of a worker: about itself only."""

from __future__ import annotations

from services.worker.attach.status import Status
from shared.errors import FailedPrecondition
from shared.pb.admin.v1 import admin_pb2 as pb


class Administration:
    """Its status; which prefixes are cached is the scheduler's to say."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(services=[self._status.read()])

    async def reset_prefix_cache(self, _request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        raise FailedPrecondition("a worker does not own its prefix cache: ask its scheduler to reset it")
