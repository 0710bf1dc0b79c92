"""`quire up` and related commands, as scripts use them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from quire import bundled
from quire.cluster.process import ServiceProcess
from tests.e2e.conftest import running_cluster
from tests.preloaded import command
from tests.preloaded.forked import Forked
from tests.waiting import until

QUIET = {f"QUIRE_{service}_LOG_LEVEL": "error" for service in ("FRONTEND", "SCHEDULER", "WORKER")}
QUIRE = (sys.executable, "-m", "quire")


@contextmanager
def up(*flags: str) -> Iterator[tuple[Forked, str, str]]:
    """Runs `quire up` on free ports; yields the process and its HTTP and gRPC addresses."""
    up = ("up", "--http-port", "0", "--grpc-port", "0", "--num-blocks", "300", *flags)
    with command.started(*up, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        match = re.fullmatch(
            r"quire ready http=(\S+) grpc=(\S+) metrics=\S+ scheduler=\S+ url=http://(\S+)\n", process.stdout.readline()
        )
        assert match is not None
        assert match[3] == match[1]
        yield process, match[1], match[2]


def quire(*arguments: str, status: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = command.run(*arguments, env=env)
    assert done.returncode == status, done.stderr
    return done


def services(address: str) -> dict[str, dict[str, Any]]:
    document = json.loads(quire("status", "--json", "--address", address).stdout)
    return {service["id"]: service for service in document["services"]}


def all_services(address: str, *names: str) -> dict[str, dict[str, Any]]:
    """Waits until the services are listed; a frontend appears in another's list with its session to a scheduler."""
    deadline = time.monotonic() + 60
    while not (found := services(address)).keys() >= set(names):
        assert time.monotonic() < deadline, found
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_up_serves_reports_and_drains() -> None:
    with up("--workers", "2", "--frontends", "2") as (process, http, address):
        names = {"frontend-0", "frontend-1", "scheduler-0", "worker-0", "worker-1"}
        found = all_services(address, *names)
        assert set(found) == names
        assert found["worker-0"]["role"] == "worker"
        assert found["worker-0"]["state"] == "ready"
        assert found["worker-0"]["blocks"] == {"total": 299, "free": 299, "cached": 0, "used": 0}
        assert found["worker-0"]["epoch"] > 0
        assert len({service["pid"] for service in found.values()} - {process.pid}) == 5, "real, separate processes"
        assert httpx.get(f"http://{http}/health").status_code == 200
        assert quire("chat", "What is 2 + 3?", "--temperature", "0", "--address", address).stdout == "5\n"
        assert quire("complete", "Once", "--max-tokens", "2", "--address", address).stdout.startswith("Once")
        assert "worker-1" in quire("status", "--address", address).stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert not any(alive(service["pid"]) for service in found.values())


def test_every_line_of_a_cluster_can_be_json(tmp_path: Path) -> None:
    """Includes the ready line and the report of a dead child process."""
    up = ("up", "--http-port", "0", "--grpc-port", "0", "--num-blocks", "300", "--log-format", "json")
    log = (tmp_path / "log").open("w")
    with log, command.started(*up, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        before = services(ready["grpc"])
        for name in ("worker-0", "frontend-0"):
            os.kill(before[name]["pid"], signal.SIGKILL)
        until(lambda: all(text in (tmp_path / "log").read_text() for text in ("frontend-0 ended", "worker detached")))
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert ready["message"] == "ready"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {"quire", "scheduler-0", "worker-0"} <= {line["service"] for line in lines}
    levels = {line["message"]: line["level"] for line in lines}
    assert levels["worker detached"] == "warning"
    assert {level for text, level in levels.items() if text.startswith("frontend-0 ended")} == {"error"}


@pytest.mark.slow
def test_a_child_that_dies_is_restarted_and_reported() -> None:
    with up() as (_process, _http, address):
        before = services(address)
        for name in ("worker-0", "frontend-0", "scheduler-0"):
            os.kill(before[name]["pid"], signal.SIGKILL)
        after: dict[str, Any] = {}

        def is_back() -> bool:
            done = command.run("status", "--json", "--address", address)
            after.clear()
            if done.returncode == 0:
                after.update((service["id"], service) for service in json.loads(done.stdout)["services"])
            return after.get("worker-0", {}).get("state") == "ready"

        until(is_back, 180)
        assert all(after[name]["pid"] != before[name]["pid"] for name in before)
        assert quire("chat", "What is 2 + 3?", "--temperature", "0", "--address", address).stdout == "5\n"


def test_killing_the_launcher_leaves_no_process() -> None:
    with up() as (process, _http, address):
        pids = [service["pid"] for service in services(address).values()]
        process.kill()
        until(lambda: not (any(alive(pid) for pid in pids)))


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (("scheduler", "--max-waiting", "0"), {}, "scheduler.max_waiting"),
        (
            ("scheduler",),
            {"QUIRE_SCHEDULER_MAX_WAITNG": "3"},
            "unknown environment variable QUIRE_SCHEDULER_MAX_WAITNG",
        ),
        (("worker", "--model", "/no/such/folder"), {}, "/no/such/folder"),
    ],
)
def test_wrong_settings_are_one_line_that_names_them(
    arguments: tuple[str, ...], env: dict[str, str], text: str
) -> None:
    done = subprocess.run([*QUIRE, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **env})
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_take_units_and_refuse_nonsense() -> None:
    assert "not a whole number" in quire("up", "--num-blocks", "1.5K", status=2).stderr
    assert quire("version").stdout.strip() == quire("--version").stdout.strip() != ""


@pytest.mark.parametrize("words", [("status",), ("complete", "Once"), ("chat", "Hello")])
def test_missing_cluster_is_reported(words: tuple[str, ...]) -> None:
    seen = quire(*words, "--address", "127.0.0.1:1", status=1).stderr
    assert seen.startswith("quire: no cluster answers at 127.0.0.1:1 (Connection refused)")
    assert seen.count("\n") == 1


@pytest.mark.parametrize("words", [("complete", "Once"), ("chat", "Hello")])
@pytest.mark.parametrize("mutual", [False, True])
def test_tls_port_is_reported_to_a_plain_client(words: tuple[str, ...], mutual: bool) -> None:
    """Without --tls; gRPC reports a closed connection."""
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair], ca.cert_pem.bytes() if mutual else None, mutual)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        seen = quire(*words, "--address", f"127.0.0.1:{port}", status=1).stderr
    finally:
        server.stop(0).wait()
    assert seen.startswith(
        f"quire: 127.0.0.1:{port} requires TLS; name the certificates to trust with --tls ca=FILE"
    ), seen
    assert seen.count("\n") == 1


def test_complete_reads_standard_input_and_refuses_nothing() -> None:
    assert quire("complete", "", status=1).stderr == "quire: text: TEXT is empty; give the text to continue\n"
    with running_cluster(worker={"num_blocks": 300}) as cluster:
        asked = ("complete", "-", "--max-tokens", "2", "--address", cluster.grpc_address)
        done = command.run(*asked, stdin="Once upon")
    assert done.stdout.startswith("Once upon"), done.stderr


def test_a_model_that_is_not_supported_is_one_line_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MarianMTModel"], "vocab_size": 10}')
    seen = quire("up", str(tmp_path), status=1).stderr
    assert seen.startswith("quire: config.json: architectures is ['MarianMTModel']; supported: ")
    assert seen.count("\n") == 1, seen


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
@pytest.mark.parametrize("name", ["up", "frontend"])
def test_a_port_in_use_is_one_line_that_names_it(name: str, flag: str) -> None:
    other = "--grpc-port" if flag == "--http-port" else "--http-port"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = ("--model", str(bundled.FOLDER)) if name == "frontend" else ()
        done = command.run(name, *model, flag, str(port), other, "0")
    assert done.returncode in {1, 2}
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{flag[2:].replace('-', '_')}: 127.0.0.1:{port} is in use" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_port_of_a_restarting_service_stays_reserved() -> None:
    with running_cluster(worker={"num_blocks": 300}) as cluster:
        process = cluster.process("scheduler-0")
        host, port = process.addresses["grpc"].rsplit(":", 1)
        for restarts in (1, 2, 3):
            process.signal(signal.SIGKILL)

            def is_back_on_its_port(process: ServiceProcess = process, restarts: int = restarts) -> bool:
                with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                    thief.bind((host, int(port)))
                return process.restarts >= restarts and process.ready.is_set()

            until(is_back_on_its_port)
        assert quire("chat", "What is 2 + 3?", "--temperature", "0", "--address", cluster.grpc_address).stdout == "5\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--swap-space", "2"],
            "--swap-space is a flag of vLLM that Quire does not have; use --kv-offloading-size GIB",
        ),
        (
            ["--middleware", "a.b"],
            "--middleware is a flag of vLLM that Quire does not have; the HTTP server loads no middleware",
        ),
        (["--trust-remote-code"], "is a flag of vLLM that Quire does not have; code from a checkpoint"),
    ],
)
def test_vllm_flags_are_answered_by_name(flags: list[str], text: str) -> None:
    assert text in quire("serve", "nowhere", *flags, status=2).stderr


def test_vllm_flags_that_match_the_defaults_are_accepted() -> None:
    run = quire(
        "serve", "--pipeline-parallel-size", "1", "--disable-log-requests", "./nowhere", "--port", "0", status=1
    )
    assert run.stderr.startswith("quire: model 'nowhere' does not exist; give the path of a folder")
