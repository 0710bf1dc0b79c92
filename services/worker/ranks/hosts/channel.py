"""Link between rank 0's host and another host of its replica: frames over TCP after a mutual handshake.

A frame is its length (4 bytes) and its bytes. First both sides prove knowledge of the cluster secret over both sides'
nonces; without a valid proof nothing is disclosed and nothing further is read. With `tls` files the whole link uses
TLS. The traffic of collectives is not encrypted: the hosts of a replica need a private network."""

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
    """Frames in both directions. Any thread may send, one receives."""

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
        """Switches to TLS before the first frame. `server_name`: name to verify in the server's certificate, on the
        dialling side. Raises OSError."""
        self._bytes = TlsSession(self._link, context, server_name=server_name)

    def send(self, frame: bytes) -> None:
        """Sends a frame. Raises OSError."""
        with self._sending:
            self._bytes.sendall(LENGTH.pack(len(frame)) + frame)

    def receive(self, most: int = MAX_FRAME_BYTES) -> bytes:
        """Returns the next frame. Raises Unavailable at the end of the link and for frames of more than `most` bytes,
        and OSError."""
        (size,) = LENGTH.unpack(self._receive_exactly(LENGTH.size))
        if size > most:
            raise Unavailable(f"a frame of {size} bytes exceeds the limit of {most}")
        return self._receive_exactly(size)

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the timeout of all calls; None blocks. A timeout raises TimeoutError, an OSError."""
        self._link.settimeout(seconds)

    def set_send_timeout(self, seconds: int) -> None:
        """Sets the timeout of send() only; receive() keeps its own."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def close(self) -> None:
        """Closes the link, which makes a blocked receive() of another thread fail."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # unblocks the receiving thread
        self._link.close()

    def _receive_exactly(self, size: int) -> bytes:
        """Returns the next `size` bytes. Raises Unavailable at the end of the link."""
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
    """Mutual authentication of two hosts. `secret`: None if the operator vouches for the network."""

    secret: SecretFile | None
    address: str  # HOST:PORT of rank 0's host, as configured on both sides
    tls: Tls = NO_TLS  # of the dialling host
    serving: ssl.SSLContext | None = None  # of rank 0's host

    def connect(self, channel: Channel, node: int) -> None:
        """Authenticates on the dialling host. Raises Unauthenticated if the other side does not prove the secret,
        Unavailable if it rejects this host, and OSError, also if only one side uses TLS."""
        if self.tls.dials:
            name = self.tls.server_name or self.address.rpartition(":")[0]
            channel.encrypt(client_context(self.tls), server_name=name)
        try:
            theirs, mine = channel.receive(MAX_HANDSHAKE_BYTES), os.urandom(NONCE_BYTES)
        except TimeoutError:
            raise Unavailable(
                f"{self.address} sent no handshake: is it node 0, and is `tls` set there and not here?"
            ) from None
        meeting = _meeting(self.address, node, mine, theirs)
        channel.send(NODE.pack(node) + mine + meeting.proof(self._secrets[0], "client"))
        if not meeting.is_proved(channel.receive(MAX_HANDSHAKE_BYTES), self._secrets, "server"):
            raise Unauthenticated(f"{self.address} did not prove knowledge of the cluster's secret")

    def authenticate(self, channel: Channel) -> int:
        """Authenticates on rank 0's host; returns the node number of the dialling host. Raises Unauthenticated and
        OSError."""
        if self.serving is not None:
            channel.encrypt(self.serving)
        mine = os.urandom(NONCE_BYTES)
        channel.send(mine)
        opening = channel.receive(MAX_HANDSHAKE_BYTES)
        if len(opening) != NODE.size + NONCE_BYTES + PROOF_BYTES:
            raise Unauthenticated("its first frame is not a handshake")
        node = int(NODE.unpack_from(opening)[0])
        nonce, proof = opening[NODE.size : -PROOF_BYTES], opening[-PROOF_BYTES:]
        meeting = _meeting(self.address, node, nonce, mine)
        matching = [key for key in self._secrets if hmac.compare_digest(meeting.proof(key, "client"), proof)]
        if not matching:
            raise Unauthenticated("it did not prove knowledge of the cluster's secret")
        channel.send(meeting.proof(matching[0], "server"))  # the secret that it used, as secrets may be rotating
        return node

    @property
    def _secrets(self) -> tuple[bytes, ...]:
        """Accepted secrets, the one to use first; a single empty one without a secret file."""
        return (b"",) if self.secret is None else self.secret.all


def _meeting(place: str, node: int, client_nonce: bytes, server_nonce: bytes) -> HandshakeTranscript:
    """Returns the transcript of a handshake, whose proofs bind service, both nodes, address and nonces."""
    return HandshakeTranscript(SERVICE, f"node {node}", "node 0", place, client_nonce, server_nonce)
