"""Fetching of media from the network and from an allowed folder, safe by default.

A host name is resolved once; every address has to be allowed, and the connection goes to one of these addresses, so
that a name cannot resolve to something else in between. Redirects are followed by hand and checked like the first URL.
Refusals of the policy are never repeated; time-outs, lost connections and errors of the server are, within one time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from weakref import WeakValueDictionary

import httpcore

from quire.services.frontend.media.policy import MediaPolicy
from quire.services.frontend.media.sources import InlineData, LocalFile, MediaSource, WebAddress, refused
from quire.shared.errors import InvalidArgument

Resolve = Callable[[str, int], Awaitable[list[str]]]

REDIRECTS = frozenset({301, 302, 303, 307, 308})
AGAIN = frozenset({408, 429, 500, 502, 503, 504})  # statuses after which another attempt is made
OK = 200
MAX_CONNECTIONS = 512  # of all requests
MAX_PER_HOST = 64  # so that a slow host leaves connections to others
FIRST_PAUSE_S = 0.2  # before the second attempt, twice as long each time
HEADERS = [(b"user-agent", b"quire"), (b"accept", b"image/*, */*;q=0.5"), (b"accept-encoding", b"identity")]
# Errors of a connection, after which another attempt is made.
LOST = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError, OSError)


class _FailedAttempt(Exception):
    """An attempt failed in a way that may pass, so that another one is worthwhile."""


class MediaFetcher:
    """Reads the bytes of media sources (inline, http(s), local files) under a policy."""

    def __init__(self, policy: MediaPolicy, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Prepares the fetcher. `resolve`: function of host name and port that returns the host's addresses, None: the
        system's resolver; `tls`: context with the trusted certificates, None: httpcore's."""
        self._policy, self._bounds = policy, policy.bounds
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by host
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=0,  # every connection dials an address that was checked for it
            network_backend=_CheckedBackend(policy, resolve or _resolve),
        )

    async def read(self, source: MediaSource) -> bytes:
        """Returns the bytes of a source: inline ones, those of a local file, or those fetched from an address. Raises
        InvalidArgument if the policy forbids the source, it is too large, or it cannot be read."""
        match source:
            case InlineData():
                self._check_size(len(source.content))
                return source.content
            case LocalFile():
                return await asyncio.to_thread(self._read_file, source.path)
            case WebAddress():
                return await self._fetch(source)

    async def close(self) -> None:
        await self._pool.aclose()

    async def _fetch(self, address: WebAddress) -> bytes:
        """Returns the content of a URL within `fetch_s`, retries and redirects included. Raises InvalidArgument."""
        try:
            async with asyncio.timeout(self._bounds.fetch_s):
                return await self._attempts(address)
        except TimeoutError:
            raise refused(
                f"Failed to fetch media from URL: {address.host} did not send it within {self._bounds.fetch_s:g} s"
            ) from None

    async def _attempts(self, address: WebAddress) -> bytes:
        """Returns the content of a URL; repeats attempts that failed for a reason that may pass, up to `attempts` in
        all, with pauses that double. Raises InvalidArgument."""
        pause = FIRST_PAUSE_S
        for attempt in range(1, self._bounds.attempts + 1):
            try:
                return await self._follow(address)
            except _FailedAttempt as failure:
                if attempt == self._bounds.attempts:
                    raise refused(f"Failed to fetch media from URL: {failure}") from None
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("attempts is at least 1")

    async def _follow(self, address: WebAddress) -> bytes:
        """Returns the content after up to `redirects` redirects, each checked by the policy. Raises InvalidArgument."""
        for _ in range(self._bounds.redirects + 1):
            found = await self._get(address)
            if isinstance(found, bytes):
                return found
            address = found
        raise refused(
            f"Failed to fetch media from URL: more than {self._bounds.redirects} redirects; send the final URL"
        )

    async def _get(self, address: WebAddress) -> bytes | WebAddress:
        """Returns the content, or the address that the server redirects to. Raises InvalidArgument for a forbidden host
        or another status, _FailedAttempt for a failure that may pass."""
        self._policy.check_domain(address.host)
        url = httpcore.URL(
            scheme=address.scheme.encode(),
            host=address.host.encode(),
            port=address.port,
            target=address.target.encode(),
        )
        headers = [(b"host", address.host_header.encode()), *HEADERS]
        slots = self._slots.get(address.host)
        if slots is None:
            slots = self._slots[address.host] = asyncio.Semaphore(MAX_PER_HOST)
        try:
            async with slots, self._pool.stream("GET", url, headers=headers) as response:
                if response.status in REDIRECTS:
                    return address.redirected(_header(response, b"location"))
                if response.status in AGAIN:
                    raise _FailedAttempt(f"HTTP {response.status} error")
                if response.status != OK:
                    raise refused(f"Failed to fetch media from URL: HTTP {response.status} error")
                return await self._content(response)
        except LOST as error:
            raise _FailedAttempt(f"{address.host}: {type(error).__name__}") from None
        except httpcore.ProtocolError:
            raise refused(f"Failed to fetch media from URL: {address.host} does not answer as HTTP does") from None

    async def _content(self, response: httpcore.Response) -> bytes:
        """Reads the body of a response. Raises InvalidArgument as soon as it exceeds, or announces more than,
        `download_bytes`."""
        announced = _header(response, b"content-length")
        if announced.isdigit():
            self._check_size(int(announced))
        parts, size = [], 0
        async for part in response.aiter_stream():
            size += len(part)
            self._check_size(size)
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, num_bytes: int) -> None:
        """Raises InvalidArgument if one item has more than `download_bytes`."""
        if num_bytes > self._bounds.download_bytes:
            limit = self._bounds.download_bytes >> 20
            raise refused(
                f"Maximum file size exceeded: an item of media has at most {limit} MiB, this one {num_bytes} bytes or "
                "more. Send a smaller file."
            )

    def _read_file(self, path: str) -> bytes:
        """Returns the content of a regular file beneath the policy's folder, symbolic links resolved. Raises
        InvalidArgument for all others."""
        folder = self._policy.local_folder
        if folder is None:
            raise refused("Cannot load local files without `--allowed-local-media-path`.")
        file, folder = Path(path).resolve(), folder.resolve()
        if not file.is_relative_to(folder):
            raise refused(f"The file path {path:.200} must be a subpath of `--allowed-local-media-path`.")
        try:
            if not file.is_file():  # a pipe would never end
                raise refused(f"Failed to load media: {path:.200} is not a file")
            with file.open("rb") as stream:
                content = stream.read(self._bounds.download_bytes + 1)
        except OSError as error:
            raise refused(f"Failed to load media: {path:.200}: {error.strerror}") from None
        self._check_size(len(content))
        return content


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Network backend that resolves a host name once, checks all of its addresses, and connects to these, so that a
    second resolution cannot evade the check."""

    def __init__(self, policy: MediaPolicy, resolve: Resolve) -> None:
        self._policy, self._resolve = policy, resolve
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as httpcore calls it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connects to the first address of the host that accepts. Raises InvalidArgument if the policy forbids any of
        them."""
        addresses = await self._allowed(host, port)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._backend.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def _allowed(self, host: str, port: int) -> list[str]:
        """Returns the addresses of a host. Raises InvalidArgument if it is unknown or the policy forbids one of
        them."""
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise InvalidArgument(
                f"Failed to fetch media from URL: the host name {host:.100} is unknown; check its spelling",
                field="messages",
            )
        for address in addresses:
            self._policy.check_address(ipaddress.ip_address(address.partition("%")[0]))
        return addresses


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _header(response: httpcore.Response, name: bytes) -> str:
    values = [value for key, value in response.headers if key.lower() == name]
    return values[0].decode("latin-1") if values else ""
