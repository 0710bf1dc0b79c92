"""Streams produced by this frontend, and the restoration of requests from stored streams."""

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
    """A stored request, parsed again by the edge that received it."""

    request: Request
    writer: MessageWriter


class LocalStream(NamedTuple):
    """A stream produced by this frontend, with its producer and message writer."""

    stream: Stream
    producer: StreamProducer
    writer: MessageWriter


RequestRestorer = Callable[[pb.KeptRequest], RestoredRequest]


def restore_request(restorers: Mapping[str, RequestRestorer], kept: pb.KeptRequest) -> RestoredRequest:
    """Parses a stored request with the restorer of its kind. Raises Unavailable if this version knows no such kind or
    cannot read the request; a frontend of another version may."""
    if kept.kind not in restorers:
        raise Unavailable(f"this frontend cannot continue streams of kind {kept.kind!r}")
    try:
        return restorers[kept.kind](kept)
    except QuireError:
        raise
    except Exception as fault:
        log.exception("cannot read a stored request", request=kept.request_id)
        raise Unavailable(f"this frontend cannot read the request of a stream: {type(fault).__name__}") from None


class NullMessageWriter:
    """A MessageWriter without output, for a taken-over stream until its edge has parsed the request."""

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        return []

    def final_messages(self, generation: Generation) -> list[bytes]:
        return []

    def error_messages(self, error: QuireError) -> list[bytes]:
        return []
