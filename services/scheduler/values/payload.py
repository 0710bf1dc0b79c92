"""Fields of a submission that the scheduler passes to the worker unread."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.shared.pb.common.v1 import media_pb2


@dataclass(frozen=True, slots=True)
class Payload:
    """Fields of a submission for the worker, which the scheduler does not read."""

    params: bytes
    sample: int = 0
    grammar: bytes = b""
    num_logprobs: int | None = None  # of a beam: log-probabilities per token; None: as in params


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Source of one media item's pixels, and what the worker needs to encode them. Sources at the same address are
    equal."""

    address: str  # of the MediaService that has the pixels
    item: media_pb2.MediaItem = field(compare=False)
