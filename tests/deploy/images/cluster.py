"""A cluster out of the images, a container for each service, that is asked something."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.deploy.images.builder import FRONTEND, SCHEDULER, WORKER, Builder

READY_S = 120.0
USER = 10001


def talk(builder: Builder) -> bool:
    """Whether a question whose answer is known is answered, and all end well when they are told to."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        write_secret(files)
        grpc_port, http_port, scheduler_port = _free_ports(3)
        (files / "quire.yaml").write_text(_settings(grpc_port, http_port, scheduler_port))
        environment = {"QUIRE_CONFIG": "/etc/quire/quire.yaml", "XDG_CACHE_HOME": "/tmp"}
        running = []
        try:
            for image in (SCHEDULER, WORKER, FRONTEND):
                running.append(builder.start(image, [image.role], files=files, environment=environment))
            answer = _ask(f"http://127.0.0.1:{http_port}/v1/chat/completions")
        finally:
            statuses = [service.stop() for service in reversed(running)]
    print(f"What is 23 + 45? {answer}")
    print(f"exit statuses after SIGTERM: {statuses}")
    return answer == "68" and not any(statuses)


def write_secret(files: Path) -> None:
    """For the images' user alone, in a folder that it can read."""
    files.chmod(0o755)
    secret = files / "secret"
    secret.write_text("of this test alone, and long enough to be one")
    secret.chmod(0o400)
    os.chown(secret, USER, USER)


def _settings(grpc_port: int, http_port: int, scheduler_port: int) -> str:
    """JSON is YAML."""
    secret = {"cluster_secret_file": "/etc/quire/secret"}
    model = "/opt/quire/quire-tiny"
    return json.dumps({
        "frontend": {
            "model": model,
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "http_port": http_port,
            "schedulers": [f"127.0.0.1:{scheduler_port}"],
            **secret,
        },
        "scheduler": {"host": "127.0.0.1", "grpc_port": scheduler_port, "metrics_port": 0, **secret},
        "worker": {
            "model": model,
            "host": "127.0.0.1",
            "grpc_port": 0,
            "scheduler": f"127.0.0.1:{scheduler_port}",
            "metrics_port": 0,
            "num_blocks": 256,
            **secret,
        },
    })  # fmt: skip


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _ask(url: str) -> str:
    question = {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0}
    request = urllib.request.Request(url, json.dumps(question).encode(), {"content-type": "application/json"})
    end = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return str(json.load(reply)["choices"][0]["message"]["content"])
        except (OSError, urllib.error.HTTPError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
