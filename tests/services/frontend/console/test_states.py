"""The console when parts of the cluster are down, when an API key is missing, and in windows of other sizes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tests.services.frontend.console.browser import CHROMIUM, Browser, browsing
from tests.services.frontend.console.test_console import ask, streaming

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

KEY = "k" * 40
WIDTHS = (390, 760, 1400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"num_blocks": 34233, "threads": 1}) as running:
        yield running


@contextmanager
def opened(cluster: Cluster, path: str = "", width: int = 1280) -> Iterator[Browser]:
    with browsing() as browser:
        browser.open(f"http://{cluster.http_address}/{path}", width=width)
        yield browser


def said(browser: Browser, name: str) -> str:
    return str(browser.evaluate(f"document.getElementById({name!r}).innerText"))


def wait_for(browser: Browser, name: str, text: str) -> None:
    browser.wait(f"document.getElementById({name!r}).innerText.includes({text!r})")


def type_key(browser: Browser, key: str) -> None:
    browser.evaluate(
        f"document.getElementById('key').value = {key!r};"
        "document.getElementById('key').dispatchEvent(new Event('change'))"
    )


@pytest.mark.slow
def test_a_frontend_that_is_gone_leaves_no_figures_that_look_like_those_of_now() -> None:
    with browsing() as browser:
        with running_cluster(worker={"num_blocks": 300, "threads": 1}) as cluster:
            browser.open(f"http://{cluster.http_address}/")
            wait_for(browser, "vital-word", "ready")
            browser.evaluate("document.querySelector('[data-tab=cluster]').click()")
            browser.wait("document.querySelectorAll('#map .box').length === 3")
        wait_for(browser, "vital-word", "unreachable")
        assert [said(browser, name) for name in ("vital-rate", "vital-running", "vital-waiting")] == ["–"] * 3
        assert "The frontend does not answer" in said(browser, "notice")
        assert "the frontend does not answer" in said(browser, "events")
        assert browser.evaluate("document.getElementById('map').classList.contains('stale')") is True
        browser.evaluate("document.querySelector('[data-tab=chat]').click()")
        assert ask(browser, "Hello").startswith("The frontend does not answer.")


def test_a_cluster_whose_last_worker_died_says_that_sequences_wait(cluster: Cluster) -> None:
    with opened(cluster) as browser:
        wait_for(browser, "vital-word", "ready")
        browser.evaluate("document.querySelector('[data-tab=cluster]').click()")
        with streaming(cluster, 4):
            browser.wait("document.querySelectorAll('#map .link.busy').length === 2")
            cluster.process("worker-0").signal(signal.SIGKILL)
            browser.wait("/sequences? wait for a worker/.test(document.getElementById('events').innerText)")
            wait_for(browser, "vital-word", "ready")
        assert "moved to other workers" not in said(browser, "events")


@pytest.mark.slow
def test_without_any_worker_it_says_what_becomes_of_requests() -> None:
    with running_cluster(workers=0) as cluster, opened(cluster) as browser:
        wait_for(browser, "vital-word", "no worker")
        assert "There is no worker" in said(browser, "notice")
        cluster.scale_workers(1)
        wait_for(browser, "vital-word", "ready")
        browser.wait("document.getElementById('notice').hidden")


@pytest.mark.slow
def test_where_there_are_keys_it_asks_for_one_and_the_api_s_page_does_as_well() -> None:
    with running_cluster(worker={"num_blocks": 300}, frontend={"api_key": KEY}) as cluster, opened(cluster) as browser:
        wait_for(browser, "vital-word", "key required")
        assert "enter yours at the top right" in said(browser, "notice")
        type_key(browser, "wrong")
        wait_for(browser, "notice", "unknown API key")
        browser.evaluate("sessionStorage.clear(); document.querySelector('nav a').click()")
        browser.wait("document.title === 'Quire: API' && document.getElementById('status').innerText !== ''")
        assert "enter yours at the top right" in said(browser, "status")
        type_key(browser, KEY)
        browser.wait("document.querySelectorAll('.opblock-post').length > 40")
        browser.open(f"http://{cluster.http_address}/")
        browser.wait("document.getElementById('model').value === 'quire-tiny'")
        wait_for(browser, "vital-word", "ready")


def test_what_the_api_s_page_sends_is_answered(cluster: Cluster) -> None:
    block = "document.querySelector('[data-path=\"/v1/completions\"]')?.closest('.opblock')"
    with opened(cluster, "console/api.html") as browser:
        browser.wait(f"document.querySelectorAll('.opblock-post').length > 40 && !!{block}")
        browser.evaluate(f"{block}.querySelector('.opblock-summary-control').click()")
        browser.wait(f"{block}.querySelector('.try-out__btn') !== null")
        browser.evaluate(f"{block}.querySelector('.try-out__btn').click()")
        browser.wait(f"{block}.querySelector('.execute') !== null")
        assert "Once upon a time" in browser.evaluate(f"{block}.querySelector('textarea').value")
        browser.evaluate(f"{block}.querySelector('.execute').click()")
        browser.wait(f"{block}.querySelector('.live-responses-table tbody .response-col_status') !== null")
        assert (
            browser.evaluate(f"{block}.querySelector('.live-responses-table tbody .response-col_status').innerText")
            == "200"
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off_or_too_small_to_read(cluster: Cluster, width: int) -> None:
    with opened(cluster, width=width) as browser:
        wait_for(browser, "vital-word", "ready")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        if browser.evaluate("getComputedStyle(document.getElementById('settings')).display") != "none":
            browser.evaluate("document.getElementById('settings').click()")
        for name in ("model", "temperature", "system", "clear"):
            assert browser.evaluate(f"document.getElementById({name!r}).getBoundingClientRect().width") > 40, name
        browser.evaluate("document.querySelector('[data-tab=cluster]').click()")
        browser.wait("document.querySelectorAll('#map .box').length === 3")
        heights = browser.evaluate(
            "[...document.querySelectorAll('#map text')].map(t => t.getBoundingClientRect().height)"
        )
        assert min(heights) >= 9
        beyond = browser.evaluate(
            "[...document.querySelectorAll('#map g')].flatMap(group => {"
            "  const card = group.querySelector('.box').getBoundingClientRect();"
            "  return [...group.querySelectorAll('text')].filter(t => {"
            "    const box = t.getBoundingClientRect(); return box.right > card.right || box.left < card.left; })"
            "}).map(t => t.textContent)"
        )
        assert beyond == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_charts_have_an_axis_and_empty_views_explain_themselves(cluster: Cluster) -> None:
    with opened(cluster) as browser:
        browser.evaluate("document.querySelector('[data-tab=cluster]').click()")
        assert "No events yet" in browser.evaluate(
            "getComputedStyle(document.getElementById('events'), '::before').content"
        )
        wait_for(browser, "curve-begin", "s ago")
        assert int(said(browser, "curve-top").replace(",", "")) >= 1


def test_the_reason_for_an_end_is_no_button(cluster: Cluster) -> None:
    with opened(cluster) as browser:
        assert "finish reason: stop" in ask(browser, "What is 17 + 25?")
