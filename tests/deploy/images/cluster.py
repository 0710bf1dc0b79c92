"""Runs a cluster from the images, one container per service, and queries it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trustme

from tests.deploy.images import inside
from tests.deploy.images.builder import FRONTEND, SCHEDULER, WORKER, Builder, Service

READY_S = 120.0
ROLES = (SCHEDULER, WORKER, FRONTEND)  # in the order of starting
USER = 10001


def talk(builder: Builder) -> bool:
    """Whether a question with a known answer is answered, and all services exit cleanly on request; with and without
    TLS."""
    return all([_look_inside(builder), _talk(builder, None), _talk(builder, trustme.CA())])


def _look_inside(builder: Builder) -> bool:
    """Whether each image has everything that its Python and its service may need, also for features that the
    question does not use."""
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        write_secret(files)
        shutil.copy(inside.__file__, files / "inside.py")
        for image in ROLES:
            with builder.container(image) as container:
                done = builder.call(container, ["python", "/etc/quire/inside.py", image.role], files=files)
            print(f"{image.tag}: {', '.join(done.stdout.splitlines())}")
            if done.returncode:
                print(done.stderr)
                good = False
    return good


def _talk(builder: Builder, authority: trustme.CA | None) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        write_secret(files)
        tls = _write_certificates(files, authority) if authority else {}
        ports = _free_ports(3)
        grpc_port, http_port, _ = ports
        (files / "quire.yaml").write_text(_settings(*ports, tls))
        environment = {"QUIRE_CONFIG": "/etc/quire/quire.yaml", "XDG_CACHE_HOME": "/tmp"}
        running: list[Service] = []
        try:
            for image in ROLES:
                running.append(builder.start(image, [image.role], files=files, environment=environment))
            answer = _ask(f"http{'s' * bool(tls)}://127.0.0.1:{http_port}/v1/chat/completions", authority)
            health = _health(builder, running[-1], grpc_port, files, tls)
        finally:
            statuses = [service.stop() for service in reversed(running)]
    print(f"What is 23 + 45? {answer}; quire health: {health}; TLS: {'on' if tls else 'off'}")
    print(f"exit statuses after SIGTERM: {statuses}")
    return answer == "68" and health == "SERVING" and not any(statuses)


def _health(builder: Builder, frontend: Service, port: int, files: Path, tls: Mapping[str, str]) -> str:
    """Runs the image's HEALTHCHECK, which takes TLS settings from a variable."""
    environment = {"QUIRE_TLS": f"ca={tls['ca']}"} if tls else {}
    command = ["quire", "health", "--grpc-port", str(port)]
    return builder.call(frontend.container, command, files=files, environment=environment).stdout.strip()


def _write_certificates(files: Path, authority: trustme.CA) -> dict[str, str]:
    """Writes certificates under the names used in the settings."""
    issued = authority.issue_cert("127.0.0.1", "localhost")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    contents = {"cert": chain, "key": issued.private_key_pem.bytes(), "ca": authority.cert_pem.bytes()}
    for name, content in contents.items():
        (files / name).write_bytes(content)
        os.chown(files / name, USER, USER)
    (files / "key").chmod(0o400)
    return {name: f"/etc/quire/{name}" for name in contents}


def write_secret(files: Path) -> None:
    """Writes a secret readable only by the images' user."""
    files.chmod(0o755)
    secret = files / "secret"
    secret.write_text("of this test alone, and long enough to be one")
    secret.chmod(0o400)
    os.chown(secret, USER, USER)


def _settings(grpc_port: int, http_port: int, scheduler_port: int, tls: Mapping[str, str]) -> str:
    """Returns settings as JSON, which is valid YAML."""
    common: dict[str, Any] = {"cluster_secret_file": "/etc/quire/secret"}
    if tls:
        common["tls"] = {**tls, "clients": "require"}
    model = "/opt/quire/quire-tiny"
    return json.dumps({
        "frontend": {
            "model": model,
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "http_port": http_port,
            "schedulers": [f"127.0.0.1:{scheduler_port}"],
            **({"client_tls": tls} if tls else {}),
            **common,
        },
        "scheduler": {"host": "127.0.0.1", "grpc_port": scheduler_port, "metrics_port": 0, **common},
        "worker": {
            "model": model,
            "host": "127.0.0.1",
            "grpc_port": 0,
            "scheduler": f"127.0.0.1:{scheduler_port}",
            "metrics_port": 0,
            "num_blocks": 256,
            **common,
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


def _ask(url: str, authority: trustme.CA | None) -> str:
    question = {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0}
    request = urllib.request.Request(url, json.dumps(question).encode(), {"content-type": "application/json"})
    trust = ssl.create_default_context()
    if authority:
        authority.configure_trust(trust)
    end = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30, context=trust) as reply:
                return str(json.load(reply)["choices"][0]["message"]["content"])
        except (OSError, urllib.error.HTTPError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
