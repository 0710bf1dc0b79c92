"""The side that listens: lets nobody in who cannot prove that it knows the cluster secret."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from quire.shared.errors import ResourceExhausted, Unauthenticated, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import handshake_pb2 as pb
from quire.shared.rpc.parts import CallStream
from quire.shared.rpc.trust.transcript import NONCE_BYTES, HandshakeTranscript
from quire.shared.security.secret_file import SecretFile

TIMEOUT_S = 5.0
MAX_PENDING_HANDSHAKES = 256  # strangers that are being asked at a time
LONGEST_NAME = 512  # characters
TELL_EVERY_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]

log = logger("trust")


class HandshakeAcceptor:
    """Of one service that others dial. Without a secret everybody is let in, and whoever wants a proof is told."""

    def __init__(self, secret: SecretFile | None, name: str) -> None:
        """`name`: role and id."""
        self._secret = secret
        self._name = name
        self._num_asked = 0
        self._told_at = -math.inf
        self.address = ""  # how others know it; set when the port is known

    async def authenticate(self, context: Context, message: Any, service: str) -> str:
        """Before anything else in a call; returns the name of the caller, empty if nothing had to be proved.

        `message`: the type that the call's server sends. Raises Unauthenticated, Unavailable or ResourceExhausted."""
        # Sent with the first message, they would be sent again with the status of a call whose first write was
        # cancelled: gRPC refuses that, and the caller waits for an end that nobody tells.
        await context.send_initial_metadata(())
        if self._secret is None:
            return ""
        if self._num_asked >= MAX_PENDING_HANDSHAKES:
            raise ResourceExhausted(f"{MAX_PENDING_HANDSHAKES} others are proving themselves", retry_after_ms=1000)
        self._num_asked += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._ask(context, message, service, self._secret)
        except TimeoutError:
            raise self._turned_away(f"no proof of the cluster secret within {TIMEOUT_S:g} s") from None
        except Unauthenticated as error:
            raise self._turned_away(error.message) from None
        finally:
            self._num_asked -= 1

    def check_name(self, proved: str, said: str) -> None:
        """Whoever has proved one name does not go on under another."""
        if proved not in ("", said):
            raise Unauthenticated(f"{proved[:LONGEST_NAME]} proved itself, and says hello as {said[:LONGEST_NAME]}")

    def unexpected_handshake(self, kind: str | None) -> Unauthenticated | None:
        """The error for a session that opens with a handshake here, where there is no secret to prove."""
        if kind != "handshake":
            return None
        return Unauthenticated(
            f"the caller wants proof of the cluster secret, and {self._name} has none: set its cluster_secret_file"
        )

    async def _ask(self, stream: CallStream, message: Any, service: str, secret: SecretFile) -> str:
        introduction = (await self._next(stream, "introduction")).introduction
        self._check(introduction)
        nonce = secrets.token_bytes(NONCE_BYTES)
        meeting = HandshakeTranscript(
            service, introduction.name, self._name, introduction.dialled, introduction.nonce, nonce
        )
        challenge = pb.Challenge(name=self._name, nonce=nonce, proof=meeting.proof(secret.first, "server"))
        await stream.write(message(handshake=pb.Handshake(challenge=challenge)))
        shown = (await self._next(stream, "proof")).proof
        if not meeting.is_proved(shown.proof, secret.all, "client"):
            raise Unauthenticated(
                f"{introduction.name} does not know the cluster secret of {self._name}: "
                "their cluster_secret_file differ"
            )
        return str(introduction.name)

    def _turned_away(self, reason: str) -> Unauthenticated:
        """Says so in the log, but not as often as a stranger likes."""
        now = time.monotonic()
        if now - self._told_at > TELL_EVERY_S:
            self._told_at = now
            log.warning("turned away", reason=reason)
        return Unauthenticated(reason)

    def _check(self, introduction: pb.Introduction) -> None:
        if len(introduction.nonce) != NONCE_BYTES or len(introduction.name) > LONGEST_NAME:
            raise Unauthenticated(
                f"an introduction has {NONCE_BYTES} bytes of nonce and a name of {LONGEST_NAME} at most"
            )
        if introduction.dialled and introduction.dialled != self.address:
            raise Unauthenticated(
                f"{introduction.name} dialled {introduction.dialled[:LONGEST_NAME]}, which is not {self._name} at "
                f"{self.address}: somebody stands between"
            )

    async def _next(self, stream: CallStream, step: str) -> pb.Handshake:
        try:
            received = await stream.read()
        except DecodeError:
            raise Unauthenticated(f"{self._name} was sent something that is no message where {step} is due") from None
        if received is grpc.aio.EOF:
            raise Unavailable("the caller closed the session before it opened")
        kind = received.WhichOneof("message")
        if kind != "handshake":
            raise Unauthenticated(
                f"{self._name} lets in who proves to know its cluster secret, and this session opened with {kind}: "
                "give the caller the same cluster_secret_file"
            )
        if received.handshake.WhichOneof("step") != step:
            raise Unauthenticated(f"{received.handshake.WhichOneof('step')} where {step} is due")
        handshake: pb.Handshake = received.handshake
        return handshake
