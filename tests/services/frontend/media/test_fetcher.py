"""Fetching: nothing is reachable that the operator has not allowed, and a bad server costs only its own request."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quire.services.frontend.media.fetcher import MAX_PER_HOST, MediaFetcher, Resolve
from quire.services.frontend.media.policy import MediaBounds, MediaPolicy
from quire.services.frontend.media.sources import parse
from quire.shared.errors import InvalidArgument
from tests.services.frontend.media.media_server import (
    answer,
    endless,
    media_server,
    raw,
    redirect,
    silent,
)
from tests.waiting import loop_turns

BOUNDS = replace(MediaBounds(), fetch_s=20.0, download_bytes=1 << 20)
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
OPEN = MediaPolicy(frozenset("*"), LOOPBACK, bounds=BOUNDS)


@asynccontextmanager
async def fetcher(policy: MediaPolicy = OPEN, resolve: Resolve | None = None) -> AsyncIterator[MediaFetcher]:
    found = MediaFetcher(policy, resolve)
    try:
        yield found
    finally:
        await found.close()


async def refusal(url: str, policy: MediaPolicy = OPEN, resolve: Resolve | None = None) -> str:
    async with fetcher(policy, resolve) as reader:
        with pytest.raises(InvalidArgument) as refused:
            await reader.read(parse(url))
    return refused.value.message


def resolving(*addresses: str) -> tuple[Resolve, list[str]]:
    """A resolver that says `addresses` of every name, and the names that it was asked for."""
    asked: list[str] = []

    async def resolve(host: str, _port: int) -> list[str]:
        asked.append(host)
        return list(addresses)

    return resolve, asked


async def test_a_picture_is_fetched_once_and_the_host_is_named() -> None:
    async with media_server({"/a.png": answer(b"picture")}) as server, fetcher() as reader:
        assert await reader.read(parse(server.url("/a.png"))) == b"picture"
    assert server.asked == ["/a.png"]
    assert server.hosts == [f"127.0.0.1:{server.port}"]


async def test_nothing_is_fetched_until_domains_are_allowed() -> None:
    async with media_server({"/": answer(b"picture")}) as server:
        assert "allowed domains: [none; " in await refusal(server.url("/"), MediaPolicy())
        only = replace(OPEN, domains=frozenset({"example.com"}))
        assert "allowed domains: [example.com]" in await refusal(server.url("/"), only)
    assert server.asked == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
async def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    resolve, _ = resolving(address)
    policy = MediaPolicy(frozenset("*"))
    assert "is not a public address" in await refusal("http://pictures.example/", policy, resolve)


async def test_one_private_address_among_public_ones_is_refused() -> None:
    resolve, _ = resolving("93.184.216.34", "10.0.0.1")
    assert "leads to 10.0.0.1" in await refusal("http://both.example/", MediaPolicy(frozenset("*")), resolve)


async def test_a_name_is_resolved_once_for_a_connection() -> None:
    resolve, asked = resolving("127.0.0.1")
    async with media_server({"/": answer(b"x")}) as server, fetcher(OPEN, resolve) as reader:
        assert await reader.read(parse(server.url("/", "rebinding.example"))) == b"x"
    assert asked == ["rebinding.example"]
    assert server.hosts == [f"rebinding.example:{server.port}"]


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost", "localhost."])
async def test_other_spellings_of_loopback_are_refused(host: str) -> None:
    async with media_server({"/": answer(b"secret")}) as server:
        message = await refusal(server.url("/", host), MediaPolicy(frozenset("*")))
    assert "is not a public address" in message or "is unknown" in message
    assert server.asked == []


async def test_redirects_are_checked_like_the_first_url() -> None:
    resolve, _ = resolving("127.0.0.1")
    async with media_server({"/a": redirect("http://other.example/")}) as server:
        only = replace(OPEN, domains=frozenset({"pictures.example"}))
        message = await refusal(server.url("/a", "pictures.example"), only, resolve)
    assert "Input URL domain: other.example" in message


async def test_a_redirect_to_a_private_address_is_refused() -> None:
    public = ipaddress.ip_network("127.0.0.1/32")
    policy = MediaPolicy(frozenset("*"), (public,), bounds=BOUNDS)
    async with media_server({"/a": redirect("http://169.254.169.254/latest/meta-data")}) as server:
        assert "169.254.169.254" in await refusal(server.url("/a"), policy)
    assert server.asked == ["/a"]


async def test_relative_redirects_are_followed_and_loops_end() -> None:
    async with (
        media_server({"/a/b": redirect("../c?d=1"), "/c?d=1": answer(b"found"), "/l": redirect("/l")}) as server,
        fetcher() as reader,
    ):
        assert await reader.read(parse(server.url("/a/b"))) == b"found"
        assert "more than 5 redirects" in await refusal(server.url("/l"))
    assert server.asked.count("/l") == 6


@pytest.mark.parametrize("location", ["file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://x/", "http://a b/"])
async def test_redirects_to_something_else_are_refused(location: str) -> None:
    async with media_server({"/": redirect(location)}) as server:
        await refusal(server.url("/"))


@pytest.mark.parametrize(("status", "attempts"), [("404 Not Found", 1), ("403 Forbidden", 1), ("503 Busy", 3)])
async def test_only_errors_that_may_pass_are_tried_again(status: str, attempts: int) -> None:
    async with media_server({"/": answer(b"", status)}) as server:
        assert f"HTTP {status[:3]} error" in await refusal(server.url("/"))
    assert len(server.asked) == attempts


async def test_an_error_that_passes_is_survived() -> None:
    answers = {"/": [answer(b"", "503 Busy"), raw(b""), answer(b"picture")]}
    async with media_server(answers) as server, fetcher() as reader:
        assert await reader.read(parse(server.url("/"))) == b"picture"


async def test_sizes_are_bounded_announced_or_not() -> None:
    announced = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
    async with media_server({"/e": endless, "/a": announced}) as server:
        assert "at most 1 MiB" in await refusal(server.url("/e"))
        assert "at most 1 MiB" in await refusal(server.url("/a"))


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000,
    ],
)
async def test_what_is_no_http_is_refused(data: bytes) -> None:
    async with media_server({"/": raw(data)}) as server:
        assert "Failed to fetch media from URL" in await refusal(server.url("/"))


async def test_a_silent_server_costs_its_own_request_alone() -> None:
    short = replace(OPEN, bounds=replace(BOUNDS, fetch_s=0.5))
    async with media_server({"/s": silent, "/f": answer(b"fast")}) as server, fetcher(short) as reader:
        waiting = asyncio.create_task(reader.read(parse(server.url("/s"))))
        assert await reader.read(parse(server.url("/f"))) == b"fast"
        with pytest.raises(InvalidArgument, match=r"did not send it within 0\.5 s"):
            await waiting


async def test_files_are_read_beneath_the_allowed_folder_alone(tmp_path: Path) -> None:
    folder, secret = tmp_path / "media", tmp_path / "secret"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"picture")
    secret.write_bytes(b"secret")
    (folder / "link").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    policy = MediaPolicy(local_folder=folder)
    async with fetcher(policy) as reader:
        assert await reader.read(parse(f"file://{folder}/a%20b.png")) == b"picture"
    for path in ("../secret", "link", "%2e%2e/secret"):
        assert "must be a subpath" in await refusal(f"file://{folder}/{path}", policy)
    for path in ("pipe", "none"):
        assert "is not a file" in await refusal(f"file://{folder}/{path}", policy)
    assert "--allowed-local-media-path" in await refusal(f"file://{folder}/a.png", MediaPolicy())
    assert "names the host" in await refusal("file://elsewhere/a.png", policy)


async def test_a_host_that_sends_nothing_leaves_connections_to_others() -> None:
    quick_answer = {"/p": answer(b"picture")}
    async with media_server({"/slow": silent}) as slow, media_server(quick_answer) as quick, fetcher() as reader:
        waiting = [asyncio.ensure_future(reader.read(parse(slow.url("/slow")))) for _ in range(2 * MAX_PER_HOST)]
        async with asyncio.timeout(20):
            while len(slow.asked) < MAX_PER_HOST:
                await loop_turns()
            assert await reader.read(parse(quick.url("/p", host="localhost"))) == b"picture"
        assert len(slow.asked) == MAX_PER_HOST
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
