"""What a frontend that makes a stream has in hand, and what it needs to go on with one that another has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.frontend.generation.delta import Delta
from services.frontend.generation.generation import Generation
from services.frontend.request.request import Request
from services.frontend.streams.maker import Maker, Writer
from services.frontend.streams.stream import Stream
from shared.errors import QuireError
from shared.pb.frontend.v1 import stream_pb2 as pb


class Remade(NamedTuple):
    """A kept request, as its edge reads it again."""

    request: Request
    writer: Writer


class Made(NamedTuple):
    """A stream that is made here, and who makes it."""

    stream: Stream
    maker: Maker
    writer: Writer


Remake = Callable[[pb.KeptRequest], Remade]


class NoWords:
    """A Writer of a stream that was taken over, until its edge has read its request."""

    def messages(self, deltas: list[Delta], generation: Generation) -> list[bytes]:
        return []

    def last(self, generation: Generation) -> list[bytes]:
        return []

    def failure(self, error: QuireError) -> list[bytes]:
        return []
