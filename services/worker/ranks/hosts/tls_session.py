"""TLS over a socket that one thread reads while others write.

OpenSSL lets one thread at a time use a session, and reading waits: so the session works in memory, under a lock that is
held for its arithmetic alone, and this class moves bytes between it and the socket.
"""

from __future__ import annotations

import socket
import ssl
import threading

PIECE_BYTES = 1 << 16


class TlsSession:
    """sendall() and recv() of a socket, encrypted."""

    def __init__(self, link: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Shakes hands. `server_name`: what the other side's certificate must say, by the side that dials; None for the
        one that listens. Raises OSError, of which ssl.SSLError is one."""
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_name is None
        self._session = context.wrap_bio(self._incoming, self._outgoing, is_server, server_name)
        self._using = threading.Lock()
        self._writing = threading.Lock()  # what is encrypted first goes out first
        self._shake_hands()

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        with self._writing:
            while view:
                with self._using:
                    view = view[self._session.write(view[:PIECE_BYTES]) :]
                    encrypted = self._outgoing.read()
                self._link.sendall(encrypted)

    def recv(self, most: int) -> bytes:
        """Nothing at the end of the link."""
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
                return b""  # frames know their lengths: what is cut off is noticed by them
            with self._using:
                self._incoming.write(encrypted)

    def _shake_hands(self) -> None:
        while True:
            try:
                self._session.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            finally:
                self._link.sendall(self._outgoing.read())  # an alert as well, which says what is wrong
            if done:
                return
            encrypted = self._link.recv(PIECE_BYTES)
            if not encrypted:
                raise ConnectionResetError("the other side ended the TLS handshake")
            self._incoming.write(encrypted)
