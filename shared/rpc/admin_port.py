"""The admin service of a process: on a port of its own, on loopback by default, protected by a key."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError, Unauthenticated
from quire.shared.logs import logger
from quire.shared.pb.admin.v1 import admin_pb2, admin_pb2_grpc
from quire.shared.rpc import admin_credentials
from quire.shared.rpc.admin_credentials import AdminCredentials
from quire.shared.rpc.guard import CallGuard, bearer
from quire.shared.rpc.server import Server
from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import NO_TLS, Settings
from quire.shared.settings.base import LOOPBACK

log = logger("admin")

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class AdminPort:
    """Server of the admin service; started and stopped with its service. `key`: for callers in the same process."""

    def __init__(self, settings: Settings, servicer: admin_pb2_grpc.AdminServiceServicer, grpc_port: int) -> None:
        """Raises InvalidArgument for settings that would expose the port without protection."""
        self._settings = settings
        self._grpc_port = grpc_port
        self._file = SecretFile(settings.admin_key_file, "admin_key_file") if settings.admin_key_file else None
        self._generated_key = secrets.token_hex(32)
        self._published: Path | None = None
        is_local = settings.admin_host in LOOPBACK
        if not is_local:
            _check_exposed(settings)
        self._server = Server(
            settings.admin_host,
            settings.admin_port,
            (SERVICE_NAME,),
            tls=NO_TLS if is_local else settings.tls,
            interceptors=(CallGuard(self._check),),
            port_setting="admin_port",
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server.methods)
        port = self._server.port
        self.address = f"{settings.admin_host}:{port}" if is_local else settings.reachable(port)

    @property
    def key(self) -> str:
        return self._file.first.decode() if self._file is not None else self._generated_key

    async def start(self) -> None:
        """Starts the server and publishes its address and key for commands of this user; logs a warning if they
        cannot be published."""
        await self._server.start()
        await self._server.set_serving(True)
        try:
            self._published = admin_credentials.publish(
                self._settings.service, self._grpc_port, AdminCredentials(self.address, self.key)
            )
        except (FailedPrecondition, OSError) as error:
            log.warning("cannot publish the admin service's address and key for local commands", reason=str(error))

    async def stop(self) -> None:
        if self._published is not None:
            self._published.unlink(missing_ok=True)
        await self._server.stop(grace_s=0.2)

    def check_operator(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Checks the key of an HTTP request; header names are in lower case. Raises Unauthenticated without a valid
        key; a generated key is known only to commands of this user."""
        shown = [value for name, value in headers if name == b"authorization"]
        error = self._check({"authorization": shown[0] if len(shown) == 1 else b""})
        if error is not None:
            raise error

    def _check(self, metadata: dict[str, str | bytes]) -> QuireError | None:
        """Returns Unauthenticated unless the metadata has the right key as a bearer token, compared in constant
        time."""
        shown = bearer(metadata)
        held = (
            self._file.holds(shown)
            if self._file is not None
            else secrets.compare_digest(self._generated_key.encode(), shown)
        )
        if held:
            return None
        what = "a wrong key" if shown else "no key"
        return Unauthenticated(f"{self._settings.title}: the admin service received {what} (admin_key_file)")


def _check_exposed(settings: Settings) -> None:
    """Raises InvalidArgument for an admin service beyond this machine without a key file, or without TLS unless
    `insecure` is set."""
    if not settings.admin_key_file:
        message = f"admin_key_file: needed for an admin service beyond this machine (admin_host {settings.admin_host})"
        raise InvalidArgument(message, field="admin_key_file")
    if not settings.tls.serves and not settings.insecure:
        message = "tls: an admin service beyond this machine needs a certificate, or its key could be intercepted"
        raise InvalidArgument(f"{message} (set insecure to serve without one)", field="tls")
