"""TLS from certificate files that may be replaced at any time: gRPC credentials, and contexts for other servers and
clients.

Servers check the files at every handshake, clients read them for each connection: open connections continue, new
ones use the new certificate. If the files do not match (only one of two is written yet), the old ones stay in
effect.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from quire.shared.errors import InvalidArgument, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.security.tls_files import Tls

log = logger("tls")

Value = TypeVar("Value")


class _ReloadingValue(Generic[Value]):
    """A value derived from the files, derived again when they change."""

    def __init__(self, tls: Tls, setting: str, make: Callable[[Tls], Value]) -> None:
        self._tls = tls
        self._setting = setting
        self._make = make
        self._stamps = _stamps(tls)
        self.value = self._load()

    def refresh(self) -> bool:
        """Derives `value` again if the files have changed; returns whether it is new. Unusable files are logged, and
        the previous value stays in effect."""
        stamps = _stamps(self._tls)
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.value = self._load()
        except QuireError as error:
            log.error("cannot use the new certificates; the previous ones stay in effect", reason=error.message)
            return False
        log.info("certificates reloaded", setting=self._setting)
        return True

    def _load(self) -> Value:
        """Derives the value from the files. Raises InvalidArgument, naming the setting and the files, if they are
        unusable."""
        try:
            return self._make(self._tls)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(self._tls.files)
            reason = error.strerror or error
            raise InvalidArgument(f"{self._setting}: cannot use {files}: {reason}", field=self._setting) from None


def server_credentials(tls: Tls, setting: str) -> grpc.ServerCredentials:
    """Returns credentials for a gRPC server. Raises InvalidArgument, naming `setting`, if the files are unusable."""
    kept = _ReloadingValue(tls, setting, _certificate_configuration)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return kept.value if kept.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        kept.value,
        fetch,  # type: ignore[arg-type]  # None: unchanged
        require_client_authentication=tls.is_mutual,
    )


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Returns credentials from the current files. Raises Unavailable if they are unusable."""
    client_context(tls)
    try:
        return grpc.ssl_channel_credentials(_bytes(tls.ca), _bytes(tls.key), _bytes(tls.cert))
    except OSError as error:
        raise _unusable(tls, error) from None


def client_context(tls: Tls) -> ssl.SSLContext:
    """Returns a client context from the current files, with the system's CAs if none is set. Raises Unavailable if
    they are unusable."""
    try:
        context = _context(tls, ssl.PROTOCOL_TLS_CLIENT)
        if not tls.ca:
            context.load_default_certs()
        return context
    except OSError as error:
        raise _unusable(tls, error) from None


def _unusable(tls: Tls, error: OSError) -> Unavailable:
    return Unavailable(f"tls: cannot use {', '.join(tls.files)}: {error.strerror or error}")


def server_context(tls: Tls, setting: str) -> ssl.SSLContext:
    """Returns a context for servers other than gRPC's. Raises InvalidArgument, naming `setting`, if the files are
    unusable."""
    kept = _ReloadingValue(tls, setting, _server_context)

    def at_handshake(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        kept.refresh()
        connection.context = kept.value

    front = _server_context(tls)
    front.sni_callback = at_handshake  # also called without a server name
    return front


def _certificate_configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    """Returns the certificates for a gRPC server's next handshakes. Raises OSError or SSLError if the files are
    unusable or do not match."""
    _server_context(tls)  # gRPC itself would detect a mismatched pair only at the first handshake
    return grpc.ssl_server_certificate_configuration(
        [(Path(tls.key).read_bytes(), Path(tls.cert).read_bytes())],
        root_certificates=_bytes(tls.ca) if tls.is_mutual else None,
    )


def _server_context(tls: Tls) -> ssl.SSLContext:
    """Returns a server context from the current files; with mutual TLS it requires TLS 1.3 and issues no session
    tickets."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if tls.is_mutual else ssl.CERT_NONE
    if tls.is_mutual:
        # A resumed session presents no certificate; it may have expired since, or its CA may have been removed. TLS
        # 1.2 also resumes sessions without tickets.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context


def _context(tls: Tls, protocol: int) -> ssl.SSLContext:
    """Returns a context for the protocol, with the certificate and CA that are set. Raises OSError or SSLError if
    they are unusable."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key, password="")  # an encrypted key is an error instead of a prompt
    if tls.ca:
        context.load_verify_locations(tls.ca)
    return context


def _bytes(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _stamps(tls: Tls) -> list[tuple[int, int, int] | None]:
    """Returns modification time, inode and size of each file; None for one that is missing."""
    found: list[tuple[int, int, int] | None] = []
    for path in tls.files:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            found.append(None)
    return found
