"""References to media in requests: data:, http(s): and file: URLs, read without any access to the network or disk."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from quire.shared.errors import InvalidArgument

MOST_URL_CHARACTERS = 8192  # of http(s) and file URLs
FRAMES = "video/jpeg"  # type of a data: URL with pictures in base64, joined by commas, as vLLM has it
SHOWN = 100  # characters of a value in an error
DEFAULT_PORTS = {"http": 80, "https": 443}
FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")  # characters that parsers of URLs read differently
HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")


@dataclass(frozen=True, slots=True)
class InlineData:
    """Media whose content stands in the request itself, as a data: URL."""

    content: bytes
    media_type: str  # as the sender says; empty: not said


@dataclass(frozen=True, slots=True)
class WebAddress:
    """An http(s) URL, taken apart once; nothing parses it again."""

    scheme: str
    host: str  # lower case, ASCII; an IPv6 address without brackets
    port: int
    target: str  # path and query, as it is sent

    @property
    def host_header(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def redirected(self, location: str) -> WebAddress:
        """Returns the address that a Location header names, which may be relative. Raises InvalidArgument for anything
        but http(s), and for a step from https to http."""
        base = f"{self.scheme}://{self.host_header}{self.target}"
        found = parse(urljoin(base, location.strip()))
        if not isinstance(found, WebAddress):
            raise refused("Failed to fetch media from URL: it redirects to a URL that is not http or https")
        if self.scheme == "https" and found.scheme == "http":
            raise refused("Failed to fetch media from URL: it redirects from https to http")
        return found


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file: URL, by its path on this machine."""

    path: str


MediaSource = InlineData | WebAddress | LocalFile


def refused(text: str) -> InvalidArgument:
    return InvalidArgument(text, field="messages")


def parse(url: str) -> MediaSource:
    """Parses a URL as it stands in a request. Raises InvalidArgument, with vLLM's texts, for other schemes and invalid
    URLs."""
    scheme = url[:12].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(url)
    if len(url) > MOST_URL_CHARACTERS:
        raise refused(f"The URL has {len(url)} characters; at most {MOST_URL_CHARACTERS} are accepted")
    if scheme not in {"http", "https", "file"}:
        raise refused(f"The URL must be either a HTTP, data or file URL, got {url:.{SHOWN}}")
    if FORBIDDEN.search(url):
        raise refused(f"Invalid URL format: {url!r:.{SHOWN}} contains a space, control character or backslash")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refused(f"Invalid URL format: {url!r:.{SHOWN}}") from None
    return _local_file(parts) if scheme == "file" else _web_address(parts, port, url)


def base64_bytes(text: str) -> bytes:
    """Decodes base64 strictly; padding at the end may be missing. Raises InvalidArgument."""
    text = text.strip()
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise refused(f"Failed to load media: its base64 is invalid: {text!r:.{SHOWN}}") from None


def _data_url(url: str) -> InlineData:
    """Returns the content of a data: URL. Raises InvalidArgument unless it is base64."""
    head, comma, data = url.partition(",")
    if not comma:
        raise refused(f"Invalid data URL '{url:.{SHOWN}}': missing ',' separator.")
    media_type, *parameters = head[len("data:") :].split(";")
    media_type = media_type.strip().lower()
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise refused("Only base64 data URLs are supported for now.")
    data = unquote(data) if "%" in data else data
    if media_type == FRAMES:  # decoded one by one where they are rendered
        return InlineData(data.encode(errors="replace"), media_type)
    return InlineData(base64_bytes(data), media_type)


def _web_address(parts: SplitResult, port: int | None, url: str) -> WebAddress:
    """Returns the parts of an http(s) URL. Raises InvalidArgument for credentials, an invalid host, or characters that
    are not ASCII."""
    if "@" in parts.netloc:
        raise refused("Invalid URL format: a URL of media has no user name or password")
    host = _ascii(parts.hostname or "")
    if not HOST.fullmatch(f"[{host}]" if ":" in host else host):
        raise refused(f"Invalid URL format: {url!r:.{SHOWN}} has no valid host name")
    path = parts.path or "/"
    target = f"{path}?{parts.query}" if parts.query else path
    if not target.isascii():
        raise refused("Invalid URL format: path and query have to be percent-encoded")
    scheme = parts.scheme.lower()
    return WebAddress(scheme, host.rstrip("."), port or DEFAULT_PORTS[scheme], target)


def _ascii(host: str) -> str:
    """Returns the host name in IDNA's ASCII form; empty if it has none."""
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        return ""


def _local_file(parts: SplitResult) -> LocalFile:
    """Returns the path of a file: URL. Raises InvalidArgument if it names another host."""
    if parts.netloc not in {"", "localhost"}:
        raise refused(f"The file URL names the host {parts.netloc!r:.{SHOWN}}; only files of this machine are read")
    return LocalFile(unquote(parts.path))
