"""Shared parts of the services' metrics: buckets, labels and the /metrics page."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from quire.shared import ports
from quire.shared.security.tls import server_context
from quire.shared.security.tls_files import NO_TLS, Tls

# Bucket edges that dashboards for vLLM expect, seconds.
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
MIGRATION_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
ITERATION_BUCKETS = (1, *range(8, 257, 8), 512, 1024, 2048, 4096, 8192, 16384)
COUNT_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (0, *COUNT_BUCKETS)

CALL_TIMEOUT_S = 10.0  # without receiving a byte
MAX_CALL_S = 30.0  # in total
MAX_CALLS = 64  # at the same time, each in a thread of its own

REDIS_ENTRY_KINDS = ("scheduler", "worker")  # kinds of entries in the registry and the prefix index
MODEL_LABELS = ("model_name", "engine")  # on all vllm: metrics; engine is the worker, or "0" for frontends


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """Returns bucket edges 1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    edges = [mantissa * 10**exponent for exponent in range(9) for mantissa in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= max_model_len) or (1,)


def add_process_collectors(registry: CollectorRegistry) -> None:
    """Adds CPU, memory, descriptor and garbage collection metrics of this process."""
    for process_wide in (ProcessCollector, PlatformCollector, GCCollector):
        process_wide(registry=registry)


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Limits for callers of a metrics page: seconds per call, and calls at a time."""

    max_call_s: float = MAX_CALL_S
    max_calls: int = MAX_CALLS


BOUNDS = PageBounds()


class _Server(ThreadingHTTPServer):
    """HTTP server that ignores broken connections and failed TLS handshakes, and limits the duration and number of
    calls, so that scrapers cannot exhaust threads and descriptors."""

    def __init__(self, address: tuple[str, int], answer: type[BaseHTTPRequestHandler], bounds: PageBounds) -> None:
        super().__init__(address, answer, bind_and_activate=False)
        self._bounds = bounds
        self._calls: dict[socket.socket, float] = {}  # calls in progress and their deadlines
        self._lock = threading.Lock()

    def process_request(self, call: Any, address: Any) -> None:
        """Handles a call in a thread of its own; closes it at once if max_calls are open."""
        with self._lock:
            is_kept = len(self._calls) < self._bounds.max_calls
            if is_kept:
                self._calls[call] = time.monotonic() + self._bounds.max_call_s
        if is_kept:
            super().process_request(call, address)
        else:
            self.shutdown_request(call)

    def shutdown_request(self, call: Any) -> None:
        with self._lock:
            self._calls.pop(call, None)
        super().shutdown_request(call)

    def service_actions(self) -> None:
        """Shuts down the connections of calls that exceed max_call_s; called periodically by the server's loop."""
        now = time.monotonic()
        with self._lock:
            for call, over_s in self._calls.items():
                if over_s < now:
                    with suppress(OSError):  # its own thread is closing it
                        call.shutdown(socket.SHUT_RDWR)

    def handle_error(self, _request: object, _address: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class MetricsDocument:
    """Response of a metrics page."""

    body: bytes
    content_type: str = CONTENT_TYPE_LATEST


Read = Callable[[str], MetricsDocument]  # path -> response


def of(registry: CollectorRegistry) -> Read:
    """Returns a reader of the registry's current metrics, always in Prometheus's text format: for OpenMetrics,
    prometheus_client would rename `vllm:x` to `vllm_x`."""
    return lambda _path: MetricsDocument(generate_latest(registry))


class MetricsPage:
    """Serves /metrics over HTTP, or HTTPS if `tls` says so, from a thread of its own, until close()."""

    def __init__(
        self,
        host: str,
        port: int,
        read: Read,
        tls: Tls = NO_TLS,
        *,
        share: bool = False,
        bounds: PageBounds = BOUNDS,
    ) -> None:
        """`share`: bind with SO_REUSEPORT, because the launcher holds the port."""

        class Answer(BaseHTTPRequestHandler):
            timeout = CALL_TIMEOUT_S

            def do_GET(self) -> None:
                """Answers every path with the document that `read` returns for it."""
                document = read(self.path)
                self.send_response(200)
                self.send_header("Content-Type", document.content_type)
                self.send_header("Content-Length", str(len(document.body)))
                self.end_headers()
                self.wfile.write(document.body)

            def log_message(self, *_: object) -> None:
                pass

        bound = ports.bind(host, port, "metrics_port", share=share)
        self._server = _Server(bound.getsockname()[:2], Answer, bounds)
        self._server.socket.close()
        self._server.socket = bound
        self._server.server_activate()
        if tls.serves:  # the handshake runs in the call's own thread
            context = server_context(tls, "tls")
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.port: int = self._server.socket.getsockname()[1]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
