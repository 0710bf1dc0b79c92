"""`quire run-batch` against a test server that counts its requests."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main


class Server(ThreadingHTTPServer):
    """Echoes the prompt; `refusals`: number of refusals before a prompt is answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.keys: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        self.server.asked[prompt] += 1
        self.server.keys.add(self.headers["authorization"])
        if self.server.asked[prompt] <= self.server.refusals[prompt]:
            self._send(429, {"error": {"message": "full"}})
        elif prompt == "wrong":
            self._send(400, {"error": {"message": "it is wrong"}})
        else:
            self._send(200, {"choices": [{"text": prompt}]})

    def _send(self, status: int, body: Any) -> None:
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(written)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def asking(folder: Path, *prompts: str) -> Path:
    path = folder / "in.jsonl"
    lines = (
        {"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for number, prompt in enumerate(prompts)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    return {one["custom_id"]: one for one in map(json.loads, path.read_text().splitlines())}


def running(server: Server, source: Path, target: Path, *more: str) -> int:
    address = f"http://127.0.0.1:{server.server_port}/v1"
    return main(["run-batch", "-i", str(source), "-o", str(target), "--url", address, *more])


def test_every_line_is_answered_and_failures_are_told(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    source, target = asking(tmp_path, "a", "wrong", "b"), tmp_path / "out.jsonl"
    assert running(server, source, target, "--concurrency", "2") == 1
    found = answers(target)
    assert [found[f"q{number}"]["response"]["status_code"] for number in range(3)] == [200, 400, 200]
    assert found["q0"]["response"]["body"] == {"choices": [{"text": "a"}]}
    assert (found["q0"]["error"], found["q1"]["error"]) == (None, {"code": "400", "message": "it is wrong"})
    assert "3 of 3 answered, 1 failed" in capsys.readouterr().err
    assert server.keys == {"Bearer secret"}


def test_a_second_run_asks_only_for_what_is_missing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = asking(tmp_path, "a", "wrong", "b"), tmp_path / "out.jsonl"
    running(server, source, target)
    kept = [line for line in target.read_bytes().splitlines(keepends=True) if b'"q2"' not in line]
    target.write_bytes(b"".join(kept) + b'{"custom_id": "q2", "resp')
    assert running(server, source, target) == 1
    assert server.asked == {"a": 1, "wrong": 1, "b": 2}
    assert sorted(answers(target)) == ["q0", "q1", "q2"]
    assert "3 of 3 answered, 2 of them before, 1 failed" in capsys.readouterr().err


def test_lines_that_failed_are_asked_again_on_request(server: Server, tmp_path: Path) -> None:
    source, target = asking(tmp_path, "a", "wrong"), tmp_path / "out.jsonl"
    running(server, source, target)
    assert running(server, source, target, "--retry-failed", "--quiet") == 1
    assert server.asked == {"a": 1, "wrong": 2}
    assert len(target.read_text().splitlines()) == 2


def test_a_server_without_room_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.refusals["a"] = 3
    source, target = asking(tmp_path, "a"), tmp_path / "out.jsonl"
    assert running(server, source, target) == 0
    assert server.asked["a"] == 4


def test_wrong_lines_are_named_before_anything_is_asked(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = asking(tmp_path, "a", "b")
    source.write_text(source.read_text() + "no json\n" + json.dumps({"custom_id": "", "body": {}}) + "\n")
    assert running(server, source, tmp_path / "out.jsonl") == 1
    told = capsys.readouterr().err
    assert "line 3: it is not JSON" in told
    assert "line 4: custom_id must be" in told
    assert not server.asked
