"""Models by name on a hub, against a small server with the endpoints that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.shared.models import model_hub

COMMIT, OTHER = "a" * 40, "b" * 40
FILES = {
    "config.json": b'{"vocab_size": 7}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "README.md": b"# long",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "consolidated.safetensors": b"and again",
    "onnx/model.onnx": b"another way",
}


@dataclass
class Hub:
    """Requests that the server received, and their tokens."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    token: str = ""  # needed for org/secret


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            state.asked.append(self.path)
            path = self.path.split("?")[0]
            if state.token and self.headers.get("authorization") != f"Bearer {state.token}":
                return self._answer(401, b"", {"X-Error-Code": "GatedRepo"})
            if path.startswith("/api/models/org/tiny"):
                is_tree = "/tree/" in path
                revision = path.partition("/tree/" if is_tree else "/revision/")[2] or "main"
                commit = {"main": COMMIT, "other": OTHER, COMMIT: COMMIT, OTHER: OTHER}.get(revision)
                if commit is None:
                    return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                if is_tree:
                    return self._json([{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in FILES.items()])
                return self._json({"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": n} for n in FILES]})
            if path.startswith("/org/tiny/resolve/"):
                commit, _, name = path.removeprefix("/org/tiny/resolve/").partition("/")
                data = FILES[name]
                headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
                return self._answer(200, data, headers)
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"content-type": "application/json"})

        def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def find(
    home: Path, url: str, model: str, *, revision: str = "", weights: bool = True, first: str = "", **more: str
) -> tuple[str, str]:
    """Returns the folder and the output of a separate process: huggingface_hub reads its variables once. `first`: what
    that process does before."""
    script = (
        f"{first}\n"
        "import sys; from quire.shared.models import model_hub; from quire.shared.errors import QuireError\n"
        "try: print(model_hub.find(sys.argv[1], sys.argv[2], weights=sys.argv[3] == 'True'))\n"
        "except QuireError as error: sys.exit(f'{type(error).__name__}: {error.message}')"
    )
    variables = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "PATH": "", **more}
    run = subprocess.run(
        [sys.executable, "-c", script, model, revision, str(weights)],
        env=variables, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    return run.stdout.strip(), run.stderr


def test_a_name_is_downloaded_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    folder, errors = find(tmp_path, hub.url, "org/tiny")
    assert folder, errors
    held = {path.name for path in Path(folder).iterdir()}
    assert held == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    hub.asked.clear()
    assert find(tmp_path, "http://127.0.0.1:9", "org/tiny")[0] == folder
    assert find(tmp_path, hub.url, "org/tiny", HF_HUB_OFFLINE="1")[0] == folder
    assert hub.asked == []


def test_a_frontend_needs_no_weights_and_a_worker_gets_them_later(hub: Hub, tmp_path: Path) -> None:
    folder, _ = find(tmp_path, hub.url, "org/tiny", weights=False)
    assert not (Path(folder) / "model.safetensors").exists()
    folder, _ = find(tmp_path, hub.url, "org/tiny")
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_revision_has_a_folder_of_its_own(hub: Hub, tmp_path: Path) -> None:
    folder, _ = find(tmp_path, hub.url, "org/tiny", revision="other", weights=False)
    assert Path(folder).name == OTHER
    assert "no such branch" in find(tmp_path, hub.url, "org/tiny", revision="nowhere")[1]


def test_what_is_wrong_is_told_in_a_line(hub: Hub, tmp_path: Path) -> None:
    assert "neither a folder nor" in find(tmp_path, hub.url, "org/missing")[1]
    assert "HF_HUB_OFFLINE is set" in find(tmp_path, hub.url, "org/tiny", HF_HUB_OFFLINE="1")[1]
    hub.token = "secret"
    assert "gated" in find(tmp_path, hub.url, "org/tiny")[1]
    assert find(tmp_path, hub.url, "org/tiny", HF_TOKEN="secret")[0]


def test_a_cache_without_room_is_one_line(hub: Hub, tmp_path: Path) -> None:
    """The limit of a file's size stands for a full disk: both fail a write in the middle of a file."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))"
    folder, told = find(tmp_path, hub.url, "org/tiny", first=full)
    assert not folder
    last = told.strip().splitlines()[-1]
    assert last.startswith("Unavailable: model: org/tiny cannot be downloaded: "), told
    assert "Traceback" not in told
    assert find(tmp_path, hub.url, "org/tiny")[0], "once there is room"


@pytest.mark.slow  # the library tries five times, 25 s in all
def test_a_hub_that_is_away_is_said_to_be_so(tmp_path: Path) -> None:
    assert "Unavailable: model: org/tiny cannot be downloaded" in find(tmp_path, "http://127.0.0.1:9", "org/tiny")[1]


@pytest.mark.parametrize(
    ("held", "whole"),
    [
        ({"model.safetensors"}, True),
        ({"pytorch_model.bin"}, True),
        ({"training_args.bin"}, False),
        ({"model-00001-of-00002.safetensors"}, False),
        ({"model-00001-of-00002.safetensors", "model.safetensors.index.json"}, False),
        ({"pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"}, False),
        (
            {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"},
            True,
        ),
    ],
)
def test_half_a_model_is_not_all_of_it(tmp_path: Path, held: set[str], whole: bool) -> None:
    for name in held:
        (tmp_path / name).write_text("")
    for index, end in (("model.safetensors.index.json", "safetensors"), ("pytorch_model.bin.index.json", "bin")):
        stem = index.split(".")[0]
        placed = {f"w{i}": f"{stem}-0000{i}-of-00002.{end}" for i in (1, 2)}
        if index in held:
            (tmp_path / index).write_text(json.dumps({"weight_map": placed}))
    assert model_hub.is_complete(tmp_path, weights=True) is whole


def test_folders_stay_folders(tmp_path: Path) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert find(tmp_path, "http://127.0.0.1:9", str(tmp_path / "org" / "tiny"))[0] == str(tmp_path / "org" / "tiny")
    assert find(tmp_path, "http://127.0.0.1:9", "./nothing/here")[0] == "nothing/here"
