"""Combined metrics page of a local cluster's services, each sample labelled with its service, and the list of their
pages for Prometheus's service discovery."""

from __future__ import annotations

import json
import os
import re
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from quire.cluster.endpoints import LOOPBACK
from quire.shared.metrics.base import MetricsDocument, MetricsPage
from quire.shared.security.tls_files import Tls

PATIENCE_S = 2.0  # per service; Prometheus allows ten seconds in all
MOST_AT_ONCE = 16
TARGETS = "/targets"  # for http_sd_configs
UP = "quire_cluster_service_up"
HEAD = re.compile(r"# (HELP|TYPE) (\S+) ")


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Metrics page of one service."""

    role: str
    service: str
    address: str  # HOST:PORT; empty while it is down


class ClusterPage:
    """Serves the combined page. `targets`: returns the current targets; `tls`: settings of the services' pages."""

    def __init__(self, port: int, targets: Callable[[], list[ScrapeTarget]], tls: Tls) -> None:
        self._targets = targets
        self._scheme = "https" if tls.serves else "http"
        self._context = _context(tls) if tls.serves else None
        self._readers = ThreadPoolExecutor(MOST_AT_ONCE, "metrics")
        self._page = MetricsPage(LOOPBACK, port, self._read, share=True)
        self.address = f"{LOOPBACK}:{self._page.port}"

    def close(self) -> None:
        self._page.close()
        self._readers.shutdown()

    def _read(self, path: str) -> MetricsDocument:
        if path.partition("?")[0] == TARGETS:
            return MetricsDocument(self.discovery(), "application/json")
        return MetricsDocument(merged(self._pages()).encode())

    def text(self) -> str:
        return merged(self._pages())

    def sample(self, service: str, name: str) -> float:
        """Returns a service's current value of a metric without labels; 0 if unknown."""
        page = next((self._fetch(target) for target in self._targets() if target.service == service), None)
        found = re.search(rf"^{name} (\S+)$", page or "", re.MULTILINE)
        return float(found[1]) if found else 0.0

    def discovery(self) -> bytes:
        """Returns the document for file_sd_configs and http_sd_configs; job names are those of compose and
        Kubernetes."""
        groups = [
            {"targets": [target.address], "labels": {"job": f"quire-{target.role}", "service": target.service}}
            for target in self._targets()
            if target.address
        ]
        return json.dumps(groups, indent=2).encode()

    def _pages(self) -> dict[str, str | None]:
        targets = self._targets()
        return dict(zip((target.service for target in targets), self._readers.map(self._fetch, targets), strict=True))

    def _fetch(self, target: ScrapeTarget) -> str | None:
        """Reads a target's page; None if it does not answer."""
        try:
            url = f"{self._scheme}://{target.address}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_S, context=self._context) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError):
            return None


def write_discovery(path: Path, document: bytes) -> None:
    """Replaces the file atomically, because Prometheus reads it whenever it changes."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_bytes(document)
    written.replace(path)


@dataclass(slots=True)
class _Family:
    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged(pages: Mapping[str, str | None]) -> str:
    """Merges pages, by service, in Prometheus's text format; None for a page without an answer. Samples of a family
    stay together, as the format requires, with one description each."""
    families: dict[str, _Family] = {}
    for service, page in pages.items():
        family = _Family()  # samples without a description, which prometheus_client never writes
        for line in (page or "").splitlines():
            if head := HEAD.match(line):
                family = families.setdefault(head[2], _Family())
                if not any(known.startswith(head[0]) for known in family.head):
                    family.head.append(line)
            elif line and not line.startswith("#"):
                family.samples.append(_labelled(line, service))
    families[UP] = _presence(pages)
    return "".join(f"{line}\n" for family in families.values() for line in (*family.head, *family.samples))


def _presence(pages: Mapping[str, str | None]) -> _Family:
    head = [f"# HELP {UP} Whether a service's own metrics could be read", f"# TYPE {UP} gauge"]
    return _Family(head, [f'{UP}{{service="{name}"}} {int(page is not None)}' for name, page in pages.items()])


def _labelled(sample: str, service: str) -> str:
    """Adds the service label; service names need no escaping, because the launcher chooses them."""
    label = f'service="{service}"'
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f"{sample[: brace + 1]}{label},{sample[brace + 1 :]}"
    return f"{sample[:space]}{{{label}}}{sample[space:]}"


def addresses(targets: Iterable[ScrapeTarget]) -> str:
    """Returns the targets' addresses for display."""
    return ", ".join(f"{target.service} {target.address}" for target in targets if target.address)


def _context(tls: Tls) -> ssl.SSLContext:
    """Returns a TLS context that presents the cluster's certificate and does not verify the services', whose ports
    the launcher reserves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(tls.cert, tls.key, password="")
    return context
