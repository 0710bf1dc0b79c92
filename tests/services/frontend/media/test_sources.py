"""URLs of media are read in one way, strictly, with the words that clients of vLLM know."""

from __future__ import annotations

import base64

import pytest

from quire.services.frontend.media.sources import InlineData, WebAddress, base64_bytes, parse
from quire.shared.errors import InvalidArgument

PICTURE = bytes(range(256))


def encoded(content: bytes = PICTURE) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("url", "media_type"),
    [
        (f"data:image/png;base64,{encoded()}", "image/png"),
        (f"data:image/jpeg;charset=utf-8;base64,{encoded()}", "image/jpeg"),
        (f"data:;base64,{encoded()}", ""),
        (f"data:image/png;base64,{encoded().rstrip('=')}", "image/png"),
        (f"DATA:image/PNG;BASE64,{encoded().replace('+', '%2B')}", "image/png"),
    ],
)
def test_data_urls(url: str, media_type: str) -> None:
    assert parse(url) == InlineData(PICTURE, media_type)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("data:image/png,abc", "Only base64 data URLs are supported"),
        ("data:image/png;base64", "missing ',' separator"),
        ("data:image/png;base64,###", "its base64 is invalid"),
        ("data:image/png;base64,AAAA AAAA", "its base64 is invalid"),
        ("ftp://example.com/a.png", "must be either a HTTP, data or file URL"),
        ("/etc/passwd", "must be either a HTTP, data or file URL"),
        ("", "must be either a HTTP, data or file URL"),
        ("http://", "has no valid host name"),
        ("http://user:password@example.com/", "no user name or password"),
        ("http://example.com\\@127.0.0.1/", "backslash"),
        ("http://example.com/a b", "contains a space"),
        ("http://example.com/\r\nx: y", "control character"),
        ("http://example.com:99999/", "Invalid URL format"),
        ("http://[::1/", "Invalid URL format"),
        ("http://exa%6dple.com/", "has no valid host name"),
        ("http://example.com/ü", "percent-encoded"),
        ("http://example.com/" + "a" * 10_000, "characters; at most 8192"),
    ],
)
def test_what_is_refused(url: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(url)
    assert text in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://Example.COM", WebAddress("http", "example.com", 80, "/")),
        ("https://example.com:444/a?b=c#d", WebAddress("https", "example.com", 444, "/a?b=c")),
        ("http://[2001:DB8::1]:81/", WebAddress("http", "2001:db8::1", 81, "/")),
        ("https://bücher.example/", WebAddress("https", "xn--bcher-kva.example", 443, "/")),
        ("http://example.com./", WebAddress("http", "example.com", 80, "/")),
    ],
)
def test_web_addresses(url: str, address: WebAddress) -> None:
    assert parse(url) == address


def test_the_host_header_has_the_port_where_it_is_not_the_usual_one() -> None:
    assert WebAddress("https", "a", 443, "/").host_header == "a"
    assert WebAddress("https", "a", 80, "/").host_header == "a:80"
    assert WebAddress("http", "::1", 8000, "/").host_header == "[::1]:8000"


def test_no_redirect_leaves_tls() -> None:
    with pytest.raises(InvalidArgument, match="from https to http"):
        WebAddress("https", "a", 443, "/").redirected("http://a/")


def test_bare_base64_may_lack_padding() -> None:
    assert base64_bytes(encoded(b"abcd").rstrip("=")) == b"abcd"
