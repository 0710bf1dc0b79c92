"""Creates a Redis client from a URL.

redis://[user:password@]host:port/db      rediss:// with TLS      unix:///path
redis+sentinel://[user:password@]host:port[,host:port...]/service      redis+cluster://[user:password@]host:port
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from quire.shared.errors import InvalidArgument
from quire.shared.security.secret_file import SecretFile
from quire.shared.security.tls_files import NO_TLS, Tls

# Redis is never on the critical path: a slower answer counts as none.
TIMEOUT_S = 1.0


class Password(CredentialProvider):
    """Password from the first line of a file, which is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._file = SecretFile(path, "redis_password_file", min_length=1)

    def get_credentials(self) -> tuple[str]:
        return (self._file.first.decode(),)

    async def get_credentials_async(self) -> tuple[str]:
        """Returns get_credentials(); the base class does the same, but warns at each connection."""
        return self.get_credentials()


def connect(url: str, timeout_s: float = TIMEOUT_S, *, password_file: str = "", tls: Tls = NO_TLS) -> Any:
    """Creates a client that connects at the first command. Raises InvalidArgument for an unsupported URL or an unusable
    file.

    `password_file`: for a URL without a password; `tls`: defaults for rediss:// (the URL may say ssl_ca_certs=FILE).
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        **_notices_broken_connections(),
    }
    if password_file:
        options["credential_provider"] = Password(password_file)
    scheme = urlsplit(url).scheme
    if scheme == "rediss":
        options |= _tls_options(tls)
    if scheme in {"redis", "rediss", "unix"}:
        return Redis.from_url(url, **options)
    if scheme == "redis+sentinel":
        return _through_sentinel(url, options)
    if scheme == "redis+cluster":
        return RedisCluster.from_url(url.replace("redis+cluster://", "redis://", 1), **options)
    raise InvalidArgument(
        f"redis: unsupported URL {_shown(url)!r}; supported: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://",
        field="redis",
    )


def _notices_broken_connections() -> dict[str, Any]:
    """Returns options that disable maintenance notifications: clients that await them reuse a connection whose
    server died while it was idle, and fail."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:  # older clients have no such notifications
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


def _tls_options(tls: Tls) -> dict[str, str]:
    named = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
    return {option: path for option, path in named.items() if path}


def _through_sentinel(url: str, options: dict[str, Any]) -> Any:
    """Returns a client of the service's present master, which it asks the sentinels for. Raises InvalidArgument for
    a URL without a service or with a host without a port."""
    parts = urlsplit(url)
    addresses = [_address(host, url) for host in parts.netloc.rsplit("@", 1)[-1].split(",")]
    service = parts.path.strip("/")
    if not service:
        raise InvalidArgument(
            f"redis: {_shown(url)!r} lacks the service name: redis+sentinel://host:port/SERVICE", field="redis"
        )
    login = {"username": parts.username, "password": parts.password}
    sentinel: Any = Sentinel
    found = sentinel(addresses, **options)
    return found.master_for(service, redis_class=_ThroughSentinel, **{k: v for k, v in login.items() if v}, **options)


class _ThroughSentinel(Redis):
    """Client that also closes its connections to the sentinels."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes the connections to the master and to all sentinels."""
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _shown(url: str) -> str:
    """Returns a URL without its password."""
    scheme, slashes, rest = url.partition("//")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _address(host: str, url: str) -> tuple[str, int]:
    """Returns host and port of `host`, which is written HOST:PORT. Raises InvalidArgument, with the URL without its
    password, if there is no port."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidArgument(f"redis: {_shown(url)!r} lacks the port of {host!r}", field="redis")
    return name, int(port)
