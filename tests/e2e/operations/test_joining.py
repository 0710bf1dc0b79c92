"""Workers of one `quire up` that join the cluster of another, which has none."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire import bundled
from quire.client import Client
from quire.shared.security import secret_file
from tests.preloaded import command
from tests.preloaded.forked import Forked
from tests.waiting import until

UP = ("up", "--num-blocks", "300", "--metrics-port", "0")
BODY = {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0, "max_tokens": 40}
PATIENCE_S = 120.0


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    secret_file.write(path, "s" * 32)
    return str(path)


@contextmanager
def up(*flags: str) -> Iterator[tuple[Forked, dict[str, str]]]:
    """Yields the process and the contents of its ready line."""
    with command.started(*UP, *flags, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:2] == ["quire", "ready"]
        yield process, dict(word.split("=", 1) for word in words[2:])
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def answer(url: str) -> str:
    reply = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=PATIENCE_S)
    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


def test_a_cluster_without_workers_answers_once_some_join_and_again_after_they_were_killed(secret: str) -> None:
    shared = ("--cluster-secret-file", secret)
    alone = ("--workers", "0", "--worker-start-s", str(PATIENCE_S), "--http-port", "0", "--grpc-port", "0", *shared)
    with up(*alone) as (_, cluster), ThreadPoolExecutor(1) as pool, Client(cluster["grpc"]) as client:
        asked = pool.submit(answer, cluster["url"])
        with up("--join", cluster["scheduler"], *shared) as (joined, told):
            assert asked.result(PATIENCE_S) == "68"
            assert told["scheduler"] == cluster["scheduler"]
            assert told["workers"] in {service.id for service in client.status()}
            joined.kill()
            joined.wait()
        until(lambda: not any(model.ready for model in client.models()))
        with up("--join", cluster["scheduler"], *shared) as (_, again):
            assert again["workers"] != told["workers"]
            assert answer(cluster["url"]) == "68"


@pytest.mark.slow
def test_worker_with_another_model_or_secret_is_refused_with_a_reason(secret: str, tmp_path: Path) -> None:
    shared = ("--cluster-secret-file", secret)
    with up("--http-port", "0", "--grpc-port", "0", *shared) as (_, cluster):
        join = (*UP, "--join", cluster["scheduler"])
        folder = Path(shutil.copytree(bundled.FOLDER, tmp_path / "model"))
        config = folder / "config.json"
        changed = json.loads(config.read_text())
        changed["text_config"]["rms_norm_eps"] = 1e-3
        config.write_text(json.dumps(changed))
        done = command.run(*join, *shared, str(folder))
        assert done.returncode == 1
        assert "refuses this worker" in done.stderr
        assert "Traceback" not in done.stderr
        assert said_of_another_secret(join, tmp_path)
        assert answer(cluster["url"]) == "68"


def said_of_another_secret(join: tuple[str, ...], tmp_path: Path) -> bool:
    """Returns whether a log line names the setting; the worker retries, as secrets may be rotated one by one."""
    secret_file.write(tmp_path / "other", "o" * 32)
    other = ("--cluster-secret-file", str(tmp_path / "other"))
    with command.started(*join, *other, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        found = any("cluster_secret_file" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return found
