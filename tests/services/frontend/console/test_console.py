"""The console, in a browser and without one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from quire.services.frontend.console import routes
from tests.e2e.conftest import running_cluster
from tests.pictures import data_url, shape
from tests.services.frontend.console.browser import CHROMIUM, Browser, browsing

NO_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PICTURES = os.environ.get("CONSOLE_PICTURES", "")  # a folder: where screenshots go
NAMES = re.compile(r"""(?:src|href)="([^"]+)"|from "([^"]+)\"""")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(workers=2, worker={"num_blocks": 600, "threads": 1}) as running:
        yield running


@pytest.fixture
def browser(cluster: Cluster) -> Iterator[Browser]:
    with browsing() as opened:
        opened.open(f"http://{cluster.http_address}/")
        yield opened
        mine = f"http://{cluster.http_address}/"
        assert opened.errors == []
        foreign = [url for url in opened.addresses if not url.startswith((mine, "data:", "about:"))]
        assert foreign == [], "it works offline"


def ask(browser: Browser, text: str) -> str:
    """Sends a prompt and returns the complete answer."""
    browser.wait("document.getElementById('model').value !== ''")
    browser.evaluate(
        f"document.getElementById('prompt').value = {text!r};"
        "document.getElementById('temperature').value = 0;"
        "document.getElementById('temperature').dispatchEvent(new Event('input'));"
        "document.getElementById('ask').requestSubmit()"
    )
    browser.wait("document.querySelector('.message.assistant footer, .message.error') !== null")
    return str(
        browser.evaluate("[...document.querySelectorAll('.message.assistant, .message.error')].at(-1).innerText")
    )


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.screenshot(Path(PICTURES) / f"{name}.png")


def test_everything_that_the_page_names_is_served_from_here(cluster: Cluster) -> None:
    base = f"http://{cluster.http_address}"
    page = httpx.get(f"{base}/")
    assert page.headers["content-security-policy"] == routes.POLICY
    named = {a or b for a, b in NAMES.findall(page.text)}
    assert "console/console.js" in named
    for path in [*(f"/{name}" for name in named), *routes.FILES]:
        answer = httpx.get(f"{base}{path}")
        assert answer.status_code == 200, path
        assert "://" not in answer.text.replace("http://www.w3.org", ""), f"{path} names another server"
        for inner in (b for _, b in NAMES.findall(answer.text) if b):
            assert f"/console/{inner.removeprefix('./')}" in routes.FILES, (path, inner)


def test_the_cluster_status_omits_fields_for_operators(cluster: Cluster) -> None:
    services = httpx.get(f"http://{cluster.http_address}/cluster").json()["services"]
    assert {service["id"] for service in services} == {"frontend-0", "scheduler-0", "worker-0", "worker-1"}
    assert not any(set(service) & set(routes.PRIVATE) for service in services)


def test_with_keys_the_page_is_there_and_what_it_shows_is_not() -> None:
    with running_cluster(worker={"num_blocks": 300}, frontend={"api_key": "k" * 40}) as guarded:
        base = f"http://{guarded.http_address}"
        assert httpx.get(f"{base}/").status_code == httpx.get(f"{base}/console/chat.js").status_code == 200
        for path in ("/cluster", "/docs", "/openapi.json", "/v1/models"):
            assert httpx.get(f"{base}{path}").status_code == 401
        key = {"authorization": f"Bearer {'k' * 40}"}
        assert httpx.get(f"{base}/cluster", headers=key).status_code == 200


def test_docs_need_no_external_resources(cluster: Cluster) -> None:
    pytest.importorskip("fastapi_offline", reason="fastapi-offline is not installed")
    base = f"http://{cluster.http_address}"
    named = re.findall(r"(?:src|href)=\"([^\"]+)\"", httpx.get(f"{base}/docs").text)
    assert named
    assert all(httpx.get(f"{base}{path}").status_code == 200 for path in named)


@NO_BROWSER
def test_a_question_is_answered_and_inspected(browser: Browser) -> None:
    assert ask(browser, "What is 17 + 25?").startswith("42")
    picture(browser, "playground")
    browser.evaluate("document.querySelector('.message footer a').click()")
    assert browser.evaluate("document.getElementById('inspector').hidden") is False
    tokens = browser.evaluate("[...document.querySelectorAll('#tokens span')].map(s => s.textContent)")
    assert "".join(tokens).startswith("42")
    parts = browser.evaluate("[...document.querySelectorAll('#budget div')].map(d => d.className)")
    # A start and a first token in one message leave no time for prefill.
    assert {"tokenize", "schedule"} <= set(parts) <= {"tokenize", "schedule", "prefill", "decode", "write"}
    browser.evaluate("document.querySelector('#tokens span').focus()")
    alternatives = browser.evaluate("document.querySelectorAll('#alternatives i').length")
    assert alternatives == 5
    picture(browser, "inspector")


@NO_BROWSER
def test_a_picture_is_attached_answered_and_shown(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "circle.png"
    shape("circle", "yellow", 96).save(file)
    browser.wait("!document.getElementById('picture').hidden")
    browser.choose_files("#files", file)
    browser.wait("document.querySelectorAll('#pictures img').length === 1")
    assert "yellow circle" in ask(browser, "What is in the picture?")
    assert browser.evaluate("document.querySelectorAll('#pictures img').length") == 0, "it was sent"
    shown = "[...document.querySelectorAll('.message.user img')].map(img => [img.naturalWidth, img.naturalHeight])"
    assert browser.evaluate(shown) == [[96, 96]]
    browser.evaluate("document.querySelector('.message footer a').click()")
    browser.wait("document.querySelectorAll('#shown img').length === 1")
    parts = browser.evaluate("[...document.querySelectorAll('#budget div')].map(d => d.className)")
    assert {"tokenize", "schedule"} <= set(parts)
    picture(browser, "picture")


@NO_BROWSER
def test_pictures_are_dropped_removed_and_sent(browser: Browser) -> None:
    """Files that are no pictures are left out."""
    urls = [data_url(shape("circle", colour, 96)) for colour in ("red", "yellow")]
    browser.wait("!document.getElementById('picture').hidden")
    browser.evaluate(
        "const carried = new DataTransfer();"
        f"for (const url of {urls!r}) {{"
        "  const bytes = Uint8Array.from(atob(url.split(',')[1]), (byte) => byte.charCodeAt(0));"
        "  carried.items.add(new File([bytes], 'a.png', { type: 'image/png' }));"
        "}"
        "carried.items.add(new File(['text'], 'a.txt', { type: 'text/plain' }));"
        "const drop = new DragEvent('drop', { dataTransfer: carried, bubbles: true, cancelable: true });"
        "document.querySelector('.talk').dispatchEvent(drop)"
    )
    browser.wait("document.querySelectorAll('#pictures img').length === 2")
    browser.evaluate("document.querySelector('#pictures button').click()")
    browser.wait("document.querySelectorAll('#pictures img').length === 1")
    assert "yellow circle" in ask(browser, "What is in the picture?")


@NO_BROWSER
def test_a_schema_is_kept_to_and_what_is_no_json_is_said_so(browser: Browser) -> None:
    browser.evaluate("document.getElementById('schema-example').click()")
    answer = ask(browser, "Who are you?")
    assert answer.startswith("{"), answer
    browser.evaluate(
        "document.getElementById('schema').value = '{'; document.getElementById('messages').replaceChildren()"
    )
    assert ask(browser, "Who are you?").startswith("schema: ")


@contextmanager
def streaming(cluster: Cluster, count: int = 8) -> Iterator[None]:
    """Keeps `count` streams running, replacing each that ends."""
    over = threading.Event()
    params = SamplingParams(max_tokens=400, ignore_eos=True)

    def follow(number: int) -> None:
        with Client(cluster.grpc_address) as client:
            while not over.is_set():
                with contextlib.closing(client.stream(f"{number} foxes " * 9, params)) as stream:
                    for _ in stream:
                        if over.is_set():
                            break

    with ThreadPoolExecutor(count) as threads:
        followed = [threads.submit(follow, number) for number in range(count)]
        try:
            yield
        finally:
            over.set()
    for one in followed:
        one.result()


@NO_BROWSER
def test_the_map_shows_what_runs_workers_that_come_and_go_and_sequences_that_move(
    browser: Browser, cluster: Cluster
) -> None:
    browser.evaluate("document.querySelector('[data-tab=cluster]').click()")
    browser.wait("document.querySelectorAll('#map .box').length === 4")
    with streaming(cluster):
        browser.wait("document.querySelectorAll('#map .link.busy').length === 3")  # the frontend's, both workers'
        browser.wait("[...document.querySelectorAll('#map .used')].every(bar => bar.getAttribute('width') > 0)")
        cluster.process("worker-1").signal(signal.SIGKILL)
        browser.wait("/sequences? moved to other workers/.test(document.getElementById('events').innerText)")
        # A worker that is back before the next poll has restarted.
        browser.wait("/worker-1 (left|restarted)/.test(document.getElementById('events').innerText)")
        browser.wait("/worker-1 (joined|restarted)/.test(document.getElementById('events').innerText)")
        browser.wait("document.querySelectorAll('#map .link.busy').length === 3")
        picture(browser, "cluster")
    assert browser.evaluate("document.querySelectorAll('#map .box').length") == 4
