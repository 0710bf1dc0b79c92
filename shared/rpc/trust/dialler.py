"""Dialling side of the handshake: proves itself, and sends nothing else to a server that cannot."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc.aio

from quire.shared.errors import Unauthenticated, Unavailable
from quire.shared.pb.common.v1 import handshake_pb2 as pb
from quire.shared.rpc import channel
from quire.shared.rpc.parts import CallStream
from quire.shared.rpc.trust.transcript import NONCE_BYTES, HandshakeTranscript
from quire.shared.security.secret_file import SecretFile
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import Settings

TIMEOUT_S = 5.0


class Dialler:
    """Identity of a service that dials others. Without a secret no handshake takes place."""

    def __init__(self, name: str = "", tls: Tls = NO_TLS, secret: SecretFile | None = None) -> None:
        """Stores the identity of the dialling service. `secret`: None: no handshake; `name`: role and id."""
        self._name = name
        self._tls = tls
        self._secret = secret

    @classmethod
    def of(cls, settings: Settings) -> Dialler:
        """Returns the dialler for a service's settings. Raises InvalidArgument for an unusable file."""
        return cls(settings.title, settings.tls, settings.cluster_secret())

    def connect(self, address: str) -> grpc.aio.Channel:
        """Opens a channel with the current certificates."""
        return channel.connect(address, self._tls, channel.SERVICE_MESSAGE_BYTES)

    async def handshake(self, stream: CallStream, message: Any, service: str, address: str, *, known: bool) -> None:
        """Performs the handshake as the first messages on `stream`. `message`: request type of the call; `known`:
        the address is from the settings, not learned from another service. Raises Unauthenticated if the server
        cannot prove itself."""
        if self._secret is None:
            return
        async with asyncio.timeout(TIMEOUT_S):
            nonce, dialled = secrets.token_bytes(NONCE_BYTES), "" if known else address
            introduction = pb.Introduction(name=self._name, nonce=nonce, dialled=dialled)
            await stream.write(message(handshake=pb.Handshake(introduction=introduction)))
            challenge = await self._challenge(stream, address)
            meeting = HandshakeTranscript(service, self._name, challenge.name, dialled, nonce, challenge.nonce)
            if not meeting.is_proved(challenge.proof, self._secret.all, "server"):
                raise Unauthenticated(
                    f"{challenge.name} at {address} does not know the cluster secret of {self._name}: "
                    "their cluster_secret_file differ"
                )
            proof = meeting.proof(self._secret.first, "client")
            await stream.write(message(handshake=pb.Handshake(proof=pb.Proof(proof=proof))))

    async def _challenge(self, stream: CallStream, address: str) -> pb.Challenge:
        """Reads and returns the server's challenge. Raises Unavailable if the server closes the stream,
        Unauthenticated if it sends anything else."""
        reply = await stream.read()
        if reply is grpc.aio.EOF:
            raise Unavailable(f"{address} closed the session before it opened")
        kind = reply.WhichOneof("message")
        if kind != "handshake" or reply.handshake.WhichOneof("step") != "challenge":
            raise Unauthenticated(
                f"the service at {address} sent {kind} instead of a proof that it knows the cluster secret "
                f"of {self._name} (cluster_secret_file)"
            )
        challenge: pb.Challenge = reply.handshake.challenge
        if len(challenge.nonce) != NONCE_BYTES:
            raise Unauthenticated(f"the nonce of {address} has {len(challenge.nonce)} bytes, not {NONCE_BYTES}")
        return challenge
