"""A client for any kind of Redis, by URL.

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

from shared.errors import InvalidArgument

# Nobody waits for Redis: an answer that takes longer than this is no answer.
TIMEOUT_S = 1.0


def connect(url: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Raises InvalidArgument for a URL of no known kind; connects at the first command."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme = urlsplit(url).scheme
    if scheme in {"redis", "rediss", "unix"}:
        return Redis.from_url(url, **options)
    if scheme == "redis+sentinel":
        return _through_sentinel(url, options)
    if scheme == "redis+cluster":
        return RedisCluster.from_url(url.replace("redis+cluster://", "redis://", 1), **options)
    raise InvalidArgument(
        f"redis: unknown kind of URL {url!r}; there are redis://, rediss://, unix://, redis+sentinel://, redis+cluster://",
        field="redis",
    )


def _through_sentinel(url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    addresses = [_address(host, url) for host in parts.netloc.rsplit("@", 1)[-1].split(",")]
    service = parts.path.strip("/")
    if not service:
        raise InvalidArgument(f"redis: {url!r} names no service (redis+sentinel://host:port/SERVICE)", field="redis")
    login = {"username": parts.username, "password": parts.password}
    sentinel: Any = Sentinel
    found = sentinel(addresses, **options)
    return found.master_for(service, redis_class=_ThroughSentinel, **{k: v for k, v in login.items() if v}, **options)


class _ThroughSentinel(Redis):
    """Closes the connections to the sentinels, too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _address(host: str, url: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidArgument(f"redis: {url!r} names no port for {host!r}", field="redis")
    return name, int(port)
