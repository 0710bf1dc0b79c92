"""`python -m tests.deploy.images build|test`: the images, built and talked to. README of k8s says what is needed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shared.version import VERSION
from tests.deploy.images import bill
from tests.deploy.images.builder import IMAGES, Builder, Image
from tests.deploy.paths import ROOT

MOST_MB = {"frontend": 250, "scheduler": 250}  # of ours, unpacked
READY_S = 120.0
USER = 10001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "test", "clean"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quire-images")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    asked = parser.parse_args()
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            print(f"images: {tool} is not installed: apt-get install {tool}", file=sys.stderr)
            return 1
    if asked.what == "clean":
        shutil.rmtree(asked.folder, ignore_errors=True)
        return 0
    builder = Builder(asked.folder)
    if asked.what == "build":
        return build(builder, dict(one.split("=", 1) for one in asked.build_arg))
    return talk(builder)


def build(builder: Builder, arguments: dict[str, str]) -> int:
    builder.make_base()
    for image in IMAGES:
        print(f"{image.tag}: built in {builder.build(image, arguments):.0f} s", flush=True)
    too_large = []
    for image in IMAGES:
        base, *own = builder.layers(image.tag)
        print(f"{image.tag}: {sum(own) / 1e6:.0f} MB on a base of {base / 1e6:.0f} MB")
        if sum(own) / 1e6 > MOST_MB.get(image.role, float("inf")):
            too_large.append(image.tag)
    if too_large:
        print(f"images: larger than they may be: {', '.join(too_large)}", file=sys.stderr)
    lacking = [image.tag for image in IMAGES if not write_bill(builder, image)]
    return bool(too_large or lacking)


def write_bill(builder: Builder, image: Image) -> bool:
    """Writes what the image is made of beside the images; false if it lacks what the package asks for."""
    with builder.unpacked(image.tag) as root:
        found = bill.of_root(root, f"quire-{image.role}", VERSION)
    path = builder.folder / f"quire-{image.role}.cdx.json"
    path.write_text(bill.text(found))
    lacking = missing(image.role, set(bill.names(found, "pypi")))
    counts = {kind: len(bill.names(found, kind)) for kind in ("deb", "pypi")}
    print(f"{image.tag}: {counts['deb']} packages of Debian, {counts['pypi']} distributions of Python: {path}")
    if lacking:
        print(f"images: {image.tag} lacks {', '.join(sorted(lacking))}", file=sys.stderr)
    return not lacking


def missing(role: str, present: set[str]) -> set[str]:
    """Distributions that pyproject.toml asks for where `role` runs, and that are not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, [*project["dependencies"], *project["optional-dependencies"][role]])
    needed = {canonicalize_name(need.name) for need in asked if need.marker is None or need.marker.evaluate()}
    return (needed | {"quire"}) - present


def talk(builder: Builder) -> int:
    """A cluster of one container each; the answer to a question whose answer is known."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        files.chmod(0o755)
        secret = files / "secret"
        secret.write_text("of this test alone, and long enough to be one")
        secret.chmod(0o400)
        os.chown(secret, USER, USER)  # which the images' user is
        grpc_port, http_port, scheduler_port = _free_ports(3)
        (files / "quire.yaml").write_text(_settings(grpc_port, http_port, scheduler_port))
        environment = {"QUIRE_CONFIG": "/etc/quire/quire.yaml", "XDG_CACHE_HOME": "/tmp"}
        frontend, scheduler, worker = IMAGES
        running = []
        try:
            for image in (scheduler, worker, frontend):
                running.append(builder.start(image, [image.role], files=files, environment=environment))
            answer = _ask(f"http://127.0.0.1:{http_port}/v1/chat/completions")
        finally:
            statuses = [service.stop() for service in reversed(running)]
    print(f"What is 23 + 45? {answer}")
    print(f"exit statuses after SIGTERM: {statuses}")
    return 0 if answer == "68" and not any(statuses) else 1


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


if __name__ == "__main__":
    sys.exit(main())
