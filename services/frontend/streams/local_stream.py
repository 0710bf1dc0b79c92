"""What a frontend that makes a stream has in hand, and what it needs to go on with one that another has begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.producer import MessageWriter, StreamProducer
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

log = logger("streams")


class RestoredRequest(NamedTuple):
    """A kept request, as its edge reads it again."""

    request: Request
    writer: MessageWriter


class LocalStream(NamedTuple):
    """A stream that is made here, and who makes it."""

    stream: Stream
    producer: StreamProducer
    writer: MessageWriter


RequestRestorer = Callable[[pb.KeptRequest], RestoredRequest]


def restore_request(restorers: Mapping[str, RequestRestorer], kept: pb.KeptRequest) -> RestoredRequest:
    """Raises QuireError: Unavailable where a frontend of another version may know how."""
    if kept.kind not in restorers:
        raise Unavailable(f"this frontend cannot go on with streams of the kind {kept.kind!r}")
    try:
        return restorers[kept.kind](kept)
    except QuireError:
        raise
    except Exception as fault:
        log.exception("a kept request cannot be read", request=kept.request_id)
        raise Unavailable(f"this frontend cannot read the request of a stream: {type(fault).__name__}") from None


class NullMessageWriter:
    """A MessageWriter of a stream that was taken over, until its edge has read its request."""

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        return []

    def final_messages(self, generation: Generation) -> list[bytes]:
        return []

    def error_messages(self, error: QuireError) -> list[bytes]:
        return []
