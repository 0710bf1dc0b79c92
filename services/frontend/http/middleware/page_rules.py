"""Rules for web pages that call a frontend, by the Host that they use and by their Origin.

A page can point its own domain at 127.0.0.1 (DNS rebinding); to the browser the frontend is then part of that site, and
the page may read every answer. Only the Host header reveals it, so on loopback without API keys the accepted host names
are listed. Clients other than browsers send no Origin, and the Host of the address that they dial.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.services.frontend.http.headers import Headers, values_of
from quire.shared.errors import InvalidArgument, PermissionDenied
from quire.shared.settings.frontend import FrontendSettings

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
LOCAL_SUFFIX = ".localhost"  # RFC 6761: browsers resolve such names locally
PROBES = ("/health", "/ready", "/live", "/ping", "/v2/health/live", "/v2/health/ready")  # need no API key either
READING = ("GET", "HEAD", "OPTIONS")
OTHER_SITES = ("cross-site", "same-site")  # of Sec-Fetch-Site, which pages cannot change
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
MAX_SHOWN = 64  # characters of a header value in an error
ALL = "*"


@dataclass(frozen=True, slots=True)
class PageRules:
    """Accepted values of the Host and Origin headers, which keep foreign web pages from calling the frontend."""

    hosts: frozenset[str] | None  # None: any
    origins: frozenset[str]  # origins that may call, in addition to the frontend's own

    @classmethod
    def of(cls, settings: FrontendSettings, *, has_keys: bool) -> PageRules:
        return cls(_hosts(settings, has_keys=has_keys), frozenset(settings.cors_origins))

    def check(self, method: str, path: str, headers: Headers, http_version: str = "1.1") -> None:
        """Checks the Host header, except for probes, and, unless the method only reads, the origin. Raises
        InvalidArgument for an invalid Host header, PermissionDenied with the setting that would permit the call."""
        hosts = values_of(b"host", headers)
        if len(hosts) > 1 or (not hosts and http_version != "1.0"):
            raise InvalidArgument(f"a request must have one Host header, got {len(hosts)}", field="host")
        host = hosts[0].strip() if hosts else ""
        if self.hosts is not None and hosts and path not in PROBES:
            self._check_host(self.hosts, host_name(host))
        if method not in READING and ALL not in self.origins:
            self._check_origin(host, values_of(b"origin", headers), values_of(b"sec-fetch-site", headers))

    def may_read(self, origin: str) -> bool:
        """Whether CORS lets pages of that origin read answers."""
        return ALL in self.origins or origin in self.origins

    def _check_host(self, known: Collection[str], name: str) -> None:
        """Raises PermissionDenied unless the Host header's name is one of `known` or a local name."""
        if name in known or name.endswith(LOCAL_SUFFIX):
            return
        shown = name[:MAX_SHOWN]
        raise PermissionDenied(
            f"host: {shown!r} is not a name of this server ({', '.join(sorted(known))}), and without API keys other "
            f"names are refused on loopback: set allowed_hosts (--allowed-hosts {shown}; * for all), or API keys",
            field="host",
        )

    def _check_origin(self, host: str, origins: Sequence[str], sites: Sequence[str]) -> None:
        """Raises PermissionDenied for a page of another site whose origin is not permitted. Browsers omit
        `sec-fetch-site` for servers without TLS outside loopback, and desktop applications always omit it and send the
        origin of their window."""
        is_other = sites[0] in OTHER_SITES if sites else any(_is_other_site(origin, host) for origin in origins)
        if not is_other or (origins and all(origin in self.origins for origin in origins)):
            return
        shown = (origins[0] if origins else "")[:MAX_SHOWN]
        raise PermissionDenied(
            f"cors_origins: pages of the origin {shown!r} may not send requests; add it to --cors-origins"
        )


def is_loopback(host: str) -> bool:
    """Whether the address is only reachable from this machine; False for host names other than localhost."""
    if host == LOCAL_NAMES[0]:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(authority: str) -> str:
    """Returns the name or address of a Host header, in lower case, without port and brackets."""
    name, _, port = authority.strip().lower().rpartition(":")
    is_bare_ipv6 = ":" in name and not name.endswith("]")
    if not name or is_bare_ipv6 or not (port == "" or port.isdigit()):
        name = authority.strip().lower()
    return name.strip("[]").removesuffix(".")


def _hosts(settings: FrontendSettings, *, has_keys: bool) -> frozenset[str] | None:
    """Returns the accepted names of the Host header, or None for any. Unset, only a frontend on loopback without API
    keys restricts them, against DNS rebinding."""
    asked = settings.allowed_hosts
    if ALL in asked or not (asked or (is_loopback(settings.host) and not has_keys)):
        return None
    names = (*LOCAL_NAMES, settings.host, settings.advertise, *asked)
    return frozenset(host_name(name) for name in names if name)


def _is_other_site(origin: str, host: str) -> bool:
    """Whether the origin is a website other than this server. Desktop applications use their own schemes
    (tauri://localhost) or a name that is not a website (http://tauri.localhost)."""
    scheme, _, authority = origin.lower().partition("://")
    if not authority:  # "null": a page without an origin, which may belong to any site
        return True
    if scheme not in DEFAULT_PORTS or host_name(authority).endswith(LOCAL_SUFFIX):
        return False
    port = DEFAULT_PORTS[scheme]
    return authority.removesuffix(port) != host.lower().removesuffix(port)
