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
    hosts = parts.netloc.rsplit("@", 1)[-1].split(",")
    addresses = [(host.rsplit(":", 1)[0], int(host.rsplit(":", 1)[1])) for host in hosts]
    service = parts.path.strip("/")
    if not service:
        raise InvalidArgument(f"redis: {url!r} names no service (redis+sentinel://host:port/SERVICE)", field="redis")
    login = {"username": parts.username, "password": parts.password}
    sentinel: Any = Sentinel
    return sentinel(addresses, **options).master_for(service, **{k: v for k, v in login.items() if v}, **options)
