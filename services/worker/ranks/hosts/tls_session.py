"""TLS over a socket that one thread reads while others write.

OpenSSL allows one thread at a time per session, and reads block: so the session works on memory buffers, under a lock
held for its computation only, and this class moves bytes between the buffers and the socket."""

from __future__ import annotations

import socket
import ssl
import threading

PIECE_BYTES = 1 << 16


class TlsSession:
    """Encrypted sendall() and recv() of a socket."""

    def __init__(self, link: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Performs the handshake. `server_name`: name to verify in the server's certificate, on the dialling side; None
        on the listening side. Raises OSError, of which ssl.SSLError is a subclass."""
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_name is None
        self._session = context.wrap_bio(self._incoming, self._outgoing, is_server, server_name)
        self._using = threading.Lock()
        self._writing = threading.Lock()  # keeps the order of encryption when sending
        self._shake_hands()

    def sendall(self, data: bytes) -> None:
        """Encrypts and sends all bytes, while another thread may receive. Raises OSError."""
        view = memoryview(data)
        with self._writing:
            while view:
                with self._using:
                    view = view[self._session.write(view[:PIECE_BYTES]) :]
                    encrypted = self._outgoing.read()
                self._link.sendall(encrypted)

    def recv(self, most: int) -> bytes:
        """Returns up to `most` decrypted bytes, waiting for them; b"" at the end of the link. Raises OSError."""
        while True:
            with self._using:
                try:
                    return self._session.read(most)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return b""
            encrypted = self._link.recv(PIECE_BYTES)
            if not encrypted:
                return b""  # truncation is detected by the frame length
            with self._using:
                self._incoming.write(encrypted)

    def _shake_hands(self) -> None:
        """Exchanges handshake bytes until it is complete. Raises ConnectionResetError at the end of the link, and
        ssl.SSLError."""
        while True:
            try:
                self._session.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            finally:
                self._link.sendall(self._outgoing.read())  # includes alerts, which explain a failure
            if done:
                return
            encrypted = self._link.recv(PIECE_BYTES)
            if not encrypted:
                raise ConnectionResetError("the other side ended the TLS handshake")
            self._incoming.write(encrypted)
