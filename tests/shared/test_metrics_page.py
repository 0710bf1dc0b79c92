"""A metrics page with slow and numerous callers still answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any
from urllib.request import urlopen

import pytest

from quire.shared.metrics import base
from tests.waiting import until

HALF = b"GET /metrics HTTP/1.1\r\n"
PATIENCE_S = 60  # far more than any of it takes


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[base.MetricsPage]:
    """Serves a page; the parameter sets its limits."""
    bounds = getattr(request, "param", base.BOUNDS)
    document = lambda path: base.MetricsDocument(path.encode())  # noqa: E731
    with closing(base.MetricsPage("127.0.0.1", 0, document, bounds=bounds)) as served:
        yield served


def call(page: base.MetricsPage) -> socket.socket:
    """Opens a call that never completes its request."""
    connected = socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE_S)
    connected.sendall(HALF)
    return connected


def is_closed(connected: socket.socket) -> bool:
    """Whether the connection was closed or reset."""
    try:
        return connected.recv(1) == b""
    except ConnectionError:
        return True


def calls_of(page: base.MetricsPage) -> Any:
    """Returns the accepted calls."""
    return page._server._calls


def until_free(page: base.MetricsPage) -> None:
    """Waits until a slot is free again, shortly after a response or the end of a connection."""
    until(lambda: not calls_of(page), what="places do not come back")


def scrape(page: base.MetricsPage) -> bytes:
    return bytes(urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=PATIENCE_S).read())


@pytest.mark.parametrize("page", [base.PageBounds(max_call_s=0.0)], indirect=True)
def test_who_never_comes_to_the_end_is_closed(page: base.MetricsPage) -> None:
    with call(page) as slow:
        assert is_closed(slow)


@pytest.mark.parametrize("page", [base.PageBounds(max_calls=3)], indirect=True)
def test_one_too_many_is_closed_and_places_come_back(page: base.MetricsPage) -> None:
    assert scrape(page) == b"/metrics"
    until_free(page)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(call(page))
        with call(page) as surplus:
            assert is_closed(surplus)
        assert len(calls_of(page)) == 3, "those who were there stay"
    until_free(page)
    assert scrape(page) == b"/metrics"
