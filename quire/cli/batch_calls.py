"""HTTP requests of a batch, using only the standard library: one persistent connection per thread."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from quire.shared import batch_lines

LONGEST_WAIT_S = 30.0
AWAY_S = 60.0  # how long the server may be unreachable
PAUSE_S = 0.5
NOWHERE = 503


class BatchCalls:
    """HTTP client for batches; thread-safe. `url`: http(s)://HOST:PORT, optionally with a path before /v1."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._host, self._port = parts.hostname or "", parts.port
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._is_tls = parts.scheme == "https"
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._own = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends requests that wait for a retry."""
        self._stopped.set()

    def close(self) -> None:
        """Closes the connections; no thread may be sending any more."""
        for connection in self._opened:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        """Sends a request and returns status, id and body; retries while the server is overloaded or unreachable."""
        content = json.dumps(body).encode()
        away_since_s: float | None = None
        while True:
            try:
                status, headers, text = self._ask(path, content)
                away_since_s = None
            except (OSError, http.client.HTTPException) as error:
                self._close()
                away_since_s = time.monotonic() if away_since_s is None else away_since_s
                status, headers, text = NOWHERE, {}, json.dumps({"error": {"message": f"no answer: {error}"}}).encode()
            is_over = away_since_s is not None and time.monotonic() - away_since_s > AWAY_S
            if status not in batch_lines.RETRYABLE_STATUSES or is_over or self._stopped.is_set():
                return status, headers.get("x-request-id", ""), _read(text)
            wait_s = PAUSE_S if away_since_s is not None else float(headers.get("retry-after", PAUSE_S))
            self._stopped.wait(min(wait_s, LONGEST_WAIT_S))

    def _ask(self, path: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        """Posts a body on this thread's connection and returns status, headers in lower case, and body; raises
        OSError or HTTPException if the connection fails."""
        connection = self._connection()
        connection.request("POST", f"{self._root}{path}", content, self._headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def _connection(self) -> http.client.HTTPConnection:
        """Returns this thread's connection, which is created on first use and closed with the object."""
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None:
            if self._is_tls:
                context = ssl.create_default_context()
                found = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
            else:
                found = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            self._own.connection = found
            self._opened.append(found)
        return found

    def _close(self) -> None:
        """Closes this thread's connection; the next request reconnects."""
        if (found := getattr(self._own, "connection", None)) is not None:
            found.close()


def _read(text: bytes) -> Any:
    """Parses an answer as JSON; other text is returned as a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
