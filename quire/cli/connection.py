"""Flags with which commands find a cluster and authenticate."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator

from quire.client import Client
from quire.flags.setting_flags import human_int, mapping
from quire.shared.errors import Unavailable
from quire.shared.settings import Tls
from quire.shared.settings.base import build

ADDRESS_VARIABLE = "QUIRE_ADDRESS"
TLS_VARIABLE = "QUIRE_TLS"
ADMIN_ADDRESS_VARIABLE = "QUIRE_ADMIN_ADDRESS"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY_FILE"
PROBE_S = 2.0
ASKS_FOR_OURS = (
    "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    "SSLV3_ALERT_HANDSHAKE_FAILURE",
)  # the server requires a client certificate
NOT_CONNECTED = "failed to connect to all addresses"  # gRPC's wording


def add_address(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a frontend's gRPC address and the TLS files of this client."""
    parser.add_argument(
        "--address", default="", metavar="HOST:PORT", help=f"a frontend's gRPC address (or {ADDRESS_VARIABLE})"
    )
    parser.add_argument(
        "--grpc-port", type=human_int, default=50051, metavar="PORT", help="port of a frontend on this machine"
    )
    parser.add_argument(
        "--tls",
        default="",
        metavar="NAME=VALUE,...",
        help=f"ca=FILE, cert=FILE and key=FILE of ours (or {TLS_VARIABLE})",
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Adds flags of commands that call the admin service."""
    add_address(parser)
    parser.add_argument(
        "--admin-address",
        default="",
        metavar="HOST:PORT",
        help=f"admin service of a frontend of another machine or user (or {ADMIN_ADDRESS_VARIABLE})",
    )
    parser.add_argument(
        "--admin-key-file",
        default="",
        metavar="FILE",
        help=f"file with the key of that admin service (or {ADMIN_KEY_VARIABLE})",
    )


def address_of(arguments: argparse.Namespace) -> str:
    return arguments.address or os.environ.get(ADDRESS_VARIABLE, "") or f"127.0.0.1:{arguments.grpc_port}"


def tls_of(arguments: argparse.Namespace) -> Tls:
    """Returns the TLS settings. Raises InvalidArgument for malformed ones."""
    text = arguments.tls or os.environ.get(TLS_VARIABLE, "")
    return build(Tls, mapping(text), "tls")


@contextlib.contextmanager
def client_of(arguments: argparse.Namespace) -> Iterator[Client]:
    """Yields a client; if nothing answers, the error says so and what to do, instead of gRPC's wording."""
    address, tls = address_of(arguments), tls_of(arguments)
    client = Client(
        address,
        tls=tls,
        admin_address=getattr(arguments, "admin_address", "") or os.environ.get(ADMIN_ADDRESS_VARIABLE, ""),
        admin_key_file=getattr(arguments, "admin_key_file", "") or os.environ.get(ADMIN_KEY_VARIABLE, ""),
    )
    with client:
        try:
            yield client
        except Unavailable as error:
            if not tls.dials and speaks_tls(address):
                message = f"{address} requires TLS; name the certificates to trust with --tls ca=FILE"
                raise Unavailable(f"{message} (or {TLS_VARIABLE})") from None
            if NOT_CONNECTED not in error.message:
                raise
            reason = error.message.rsplit(": ", 1)[-1]
            message = f"no cluster answers at {address} ({reason}); `quire up` starts one, --address names another"
            raise Unavailable(message) from None


def speaks_tls(address: str) -> bool:
    """Returns whether a server at HOST:PORT answers a TLS handshake; its certificate is not checked."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return error.reason in ASKS_FOR_OURS
    except (OSError, ValueError):
        return False
