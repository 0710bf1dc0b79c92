"""The link between rank 0 and another host of its replica: frames over TCP, behind a proof of the cluster's secret.

A frame is its length (4 bytes) and its bytes. First both sides prove that they know the secret, over nonces of both;
who does not is told nothing and sends nothing that is read. With the files of `tls` all of it goes through TLS; what
ranks send each other in collectives does not: hosts of a replica share a network of their own.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import struct
import threading
from dataclasses import dataclass

from quire.services.worker.ranks.hosts.tls_session import TlsSession
from quire.shared.errors import Unauthenticated, Unavailable
from quire.shared.rpc.trust.transcript import NONCE_BYTES, HandshakeTranscript
from quire.shared.security.secret_file import SecretFile
from quire.shared.security.tls import client_context
from quire.shared.security.tls_files import NO_TLS, Tls

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
MAX_HANDSHAKE_BYTES = 128
PROOF_BYTES = 32
NODE = struct.Struct("<I")
SERVICE = "quire.ranks"


class Channel:
    """Frames both ways. Any thread may send, one receives."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._bytes: socket.socket | TlsSession = link
        self._sending = threading.Lock()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_address(self) -> str:
        address: str = self._link.getsockname()[0]
        return address

    def encrypt(self, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Before the first frame. `server_name`: of the side that dialled, what the other's certificate must say.
        Raises OSError."""
        self._bytes = TlsSession(self._link, context, server_name=server_name)

    def send(self, frame: bytes) -> None:
        """Raises OSError."""
        with self._sending:
            self._bytes.sendall(LENGTH.pack(len(frame)) + frame)

    def receive(self, most: int = MAX_FRAME_BYTES) -> bytes:
        """Raises Unavailable at the end of the link, and OSError."""
        (size,) = LENGTH.unpack(self._receive_exactly(LENGTH.size))
        if size > most:
            raise Unavailable(f"a frame of {size} bytes, where {most} are taken")
        return self._receive_exactly(size)

    def set_timeout(self, seconds: float | None) -> None:
        """Longest that a call waits; TimeoutError, an OSError, is raised then."""
        self._link.settimeout(seconds)

    def set_send_timeout(self, seconds: int) -> None:
        """send() raises where the other side takes nothing for so long; receive() waits as before."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # whoever receives hears of it
        self._link.close()

    def _receive_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._bytes.recv(min(size, 1 << 20))
            if not part:
                raise Unavailable("the link has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class HostHandshake:
    """Of a meeting. `secret`: None where the operator has said that nobody else is on the network."""

    secret: SecretFile | None
    address: str  # HOST:PORT of rank 0's side, as both were told
    tls: Tls = NO_TLS  # of the host that dials
    serving: ssl.SSLContext | None = None  # of rank 0's

    def connect(self, channel: Channel, node: int) -> None:
        """By the host that dials. Raises Unauthenticated where the other one does not know the secret, Unavailable
        where it does not want this one, and OSError, also where only one of both speaks TLS."""
        if self.tls.dials:
            name = self.tls.server_name or self.address.rpartition(":")[0]
            channel.encrypt(client_context(self.tls), server_name=name)
        try:
            theirs, mine = channel.receive(MAX_HANDSHAKE_BYTES), os.urandom(NONCE_BYTES)
        except TimeoutError:
            raise Unavailable(
                f"{self.address} does not greet: is it node 0, and is `tls` set there and not here?"
            ) from None
        meeting = _meeting(self.address, node, mine, theirs)
        channel.send(NODE.pack(node) + mine + meeting.proof(self._secrets[0], "client"))
        if not meeting.is_proved(channel.receive(MAX_HANDSHAKE_BYTES), self._secrets, "server"):
            raise Unauthenticated(f"{self.address} does not prove that it knows the cluster's secret")

    def accept(self, channel: Channel) -> int:
        """By rank 0's host; returns the number of the one that dialled. Raises Unauthenticated and OSError."""
        if self.serving is not None:
            channel.encrypt(self.serving)
        mine = os.urandom(NONCE_BYTES)
        channel.send(mine)
        said = channel.receive(MAX_HANDSHAKE_BYTES)
        if len(said) != NODE.size + NONCE_BYTES + PROOF_BYTES:
            raise Unauthenticated("what it says is no introduction")
        node = int(NODE.unpack_from(said)[0])
        nonce, proof = said[NODE.size : -PROOF_BYTES], said[-PROOF_BYTES:]
        meeting = _meeting(self.address, node, nonce, mine)
        found = [one for one in self._secrets if hmac.compare_digest(meeting.proof(one, "client"), proof)]
        if not found:
            raise Unauthenticated("it does not prove that it knows the cluster's secret")
        channel.send(meeting.proof(found[0], "server"))  # the one that it has shown: secrets may be changing
        return node

    @property
    def _secrets(self) -> tuple[bytes, ...]:
        return (b"",) if self.secret is None else self.secret.all


def _meeting(place: str, node: int, client_nonce: bytes, server_nonce: bytes) -> HandshakeTranscript:
    return HandshakeTranscript(SERVICE, f"node {node}", "node 0", place, client_nonce, server_nonce)
