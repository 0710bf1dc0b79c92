"""Accepting side of the handshake: refuses callers that cannot prove that they know the cluster secret."""

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
MAX_PENDING_HANDSHAKES = 256
MAX_NAME_LENGTH = 512  # characters
LOG_INTERVAL_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]

log = logger("trust")


class HandshakeAcceptor:
    """Authenticates the callers of one service. Without a secret every caller is accepted, and one that requires a
    proof gets an error."""

    def __init__(self, secret: SecretFile | None, name: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Stores the identity of the accepting service. `secret`: None: every caller is accepted; `name`: role and
        id; `timeout_s`: of one handshake."""
        self._timeout_s = timeout_s
        self._secret = secret
        self._name = name
        self._num_pending = 0
        self._logged_at = -math.inf
        self.address = ""  # advertised address; set when the port is known

    async def authenticate(self, context: Context, message: Any, service: str) -> str:
        """Performs the handshake as the first messages of a call; returns the caller's name, empty without a secret.

        `message`: response type of the call. Raises Unauthenticated, Unavailable or ResourceExhausted.
        """
        # Sent with the first message, they would be sent again with the status of a call whose first write was
        # cancelled; gRPC fails to do so, and the caller would wait for ever.
        await context.send_initial_metadata(())
        if self._secret is None:
            return ""
        if self._num_pending >= MAX_PENDING_HANDSHAKES:
            raise ResourceExhausted(
                f"{MAX_PENDING_HANDSHAKES} handshakes are pending, which is the limit", retry_after_ms=1000
            )
        self._num_pending += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._verify(context, message, service, self._secret)
        except TimeoutError:
            raise self._refusal(f"no proof of the cluster secret within {self._timeout_s:g} s") from None
        except Unauthenticated as error:
            raise self._refusal(error.message) from None
        finally:
            self._num_pending -= 1

    def check_name(self, proved: str, said: str) -> None:
        """Raises Unauthenticated if the hello has another name than the handshake."""
        if proved not in ("", said):
            raise Unauthenticated(
                f"{proved[:MAX_NAME_LENGTH]} authenticated, but its hello names {said[:MAX_NAME_LENGTH]}"
            )

    def unexpected_handshake(self, kind: str | None) -> Unauthenticated | None:
        """Returns the error for a session that opens with a handshake although this service has no secret; None for
        other messages."""
        if kind != "handshake":
            return None
        return Unauthenticated(
            f"the caller requires proof of the cluster secret, but {self._name} has none: set its cluster_secret_file"
        )

    async def _verify(self, stream: CallStream, message: Any, service: str, secret: SecretFile) -> str:
        """Performs the three steps of the handshake and returns the caller's name. Raises Unauthenticated if the
        caller does not prove that it knows one of the secrets."""
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

    def _refusal(self, reason: str) -> Unauthenticated:
        """Returns the error, and logs it at a limited rate."""
        now = time.monotonic()
        if now - self._logged_at > LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("caller refused", reason=reason)
        return Unauthenticated(reason)

    def _check(self, introduction: pb.Introduction) -> None:
        """Raises Unauthenticated for a malformed introduction, or one of a caller that dialled another address than
        this service's."""
        if len(introduction.nonce) != NONCE_BYTES or len(introduction.name) > MAX_NAME_LENGTH:
            raise Unauthenticated(
                f"an introduction has {NONCE_BYTES} bytes of nonce and a name of {MAX_NAME_LENGTH} at most"
            )
        if introduction.dialled and introduction.dialled != self.address:
            raise Unauthenticated(
                f"{introduction.name} dialled {introduction.dialled[:MAX_NAME_LENGTH]}, which is not the address of "
                f"{self._name}, {self.address}: the connection may be intercepted"
            )

    async def _next(self, stream: CallStream, step: str) -> pb.Handshake:
        """Reads the next message, which must be this step of a handshake. Raises Unauthenticated for another one,
        Unavailable if the caller has closed the stream."""
        try:
            received = await stream.read()
        except DecodeError:
            raise Unauthenticated(f"{self._name} received a malformed {step}") from None
        if received is grpc.aio.EOF:
            raise Unavailable("the caller closed the session before it opened")
        kind = received.WhichOneof("message")
        if kind != "handshake":
            raise Unauthenticated(
                f"{self._name} requires proof of its cluster secret, but the session opened with {kind}: "
                "give the caller the same cluster_secret_file"
            )
        if received.handshake.WhichOneof("step") != step:
            raise Unauthenticated(f"{received.handshake.WhichOneof('step')} received instead of {step}")
        handshake: pb.Handshake = received.handshake
        return handshake
