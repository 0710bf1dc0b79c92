"""gRPC channels between services, with options for long-lived streams.

Keep-alive detects a machine that disappeared without closing its connection; a peer that is alive but stuck is
detected by the heartbeats of quire.shared.rpc.duplex.
"""

from __future__ import annotations

import grpc
import grpc.aio

from quire.shared.security.tls import channel_credentials
from quire.shared.security.tls_files import NO_TLS, Tls

KEEPALIVE_MS = 10_000
CONNECT_MS = 2_000  # maximum duration of an attempt, despite the option's name; 100 was too short on a busy machine
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # accepted by a client from a frontend
SERVICE_MESSAGE_BYTES = 1024 * 1024  # accepted from unauthenticated peers; larger messages are sent in parts
RECEIVE_OPTION = "grpc.max_receive_message_length"

COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # sessions to one address must not share a connection
]


def connect(address: str, tls: Tls = NO_TLS, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Opens a channel. Certificates are read now, once for the channel. Raises Unavailable if they are unusable."""
    options = _options(tls, max_receive_bytes)
    if not tls.dials:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def connect_blocking(address: str, tls: Tls = NO_TLS) -> grpc.Channel:
    """Opens a channel for use by threads instead of an event loop. Raises Unavailable if the certificates are
    unusable."""
    options = _options(tls, MAX_MESSAGE_BYTES)
    if not tls.dials:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def _options(tls: Tls, max_receive_bytes: int) -> list[tuple[str, str | int]]:
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.dials and tls.server_name else []
    return [*CHANNEL_OPTIONS, (RECEIVE_OPTION, max_receive_bytes), *name]
