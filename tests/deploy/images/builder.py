"""Builds the images from their Dockerfiles as they stand, without a Docker engine: buildah in a chroot, on a base that
mmdebstrap makes of Debian packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.paths import DOCKERFILES, ROOT

BASE = "localhost/quire-base"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"


@dataclass(frozen=True, slots=True)
class Image:
    """One to build; `target`: the stage, where a Dockerfile has several images."""

    role: str
    target: str = ""

    @property
    def tag(self) -> str:
        return f"localhost/quire-{self.role}:test"


IMAGES = (Image("frontend"), Image("scheduler"), Image("worker", "cpu"))


class Builder:
    """Everything lies in `folder`, which may be deleted."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def buildah(self, *words: str) -> str:
        """Its output; what it says meanwhile goes to standard error."""
        storage = ("--storage-driver", "vfs", "--root", f"{self.folder}/storage", "--runroot", f"{self.folder}/run")
        done = subprocess.run(["buildah", *storage, *words], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        return done.stdout.strip()

    def make_base(self) -> None:
        """Debian with Python, and with the certificates that this machine trusts."""
        tar = self.folder / "base.tar"
        if not tar.exists():
            trusted = "/etc/ssl/certs/ca-certificates.crt"
            hook = f"--customize-hook=copy-in {trusted} {Path(trusted).parent}"
            without = [f"--dpkgopt=path-exclude=/usr/share/{room}/*" for room in ("doc", "man", "locale")]
            command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", *without, hook, SUITE, str(tar)]
            subprocess.run(command, check=True)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(tar), "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)

    def build(self, image: Image, arguments: Mapping[str, str]) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        words = ["bud", "--isolation", "chroot", "--format", "docker", "--quiet"]
        words += ["--file", str(DOCKERFILES[image.role]), "--tag", image.tag]
        words += ["--target", image.target] if image.target else []
        for name, value in {"BASE": BASE, **arguments}.items():
            words += ["--build-arg", f"{name}={value}"]
        self.buildah(*words, ".")
        return time.monotonic() - began

    def layers(self, tag: str) -> list[int]:
        """Bytes of each, unpacked: the base, then what is ours."""
        manifest = json.loads(json.loads(self.buildah("inspect", "--type", "image", tag))["Manifest"])
        return [layer["size"] for layer in manifest["layers"]]

    @contextmanager
    def unpacked(self, tag: str) -> Iterator[Path]:
        """The files of an image."""
        container = self.buildah("from", tag)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)

    def start(self, image: Image, command: Sequence[str], *, files: Path, environment: Mapping[str, str]) -> Service:
        """A process in a container made of the image; `files` are read at /etc/quire."""
        container = self.buildah("from", image.tag)
        words = ["run", "--isolation", "chroot", "--user", "10001:10001", "--volume", f"{files}:/etc/quire:ro"]
        for name, value in environment.items():
            words += ["--env", f"{name}={value}"]
        storage = ("--storage-driver", "vfs", "--root", f"{self.folder}/storage", "--runroot", f"{self.folder}/run")
        process = subprocess.Popen(
            ["buildah", *storage, *words, container, "--", "quire", *command], start_new_session=True
        )
        return Service(self, container, process)


@dataclass(frozen=True, slots=True)
class Service:
    """A container that runs; to be stopped."""

    builder: Builder
    container: str
    process: subprocess.Popen[bytes]

    def stop(self) -> int:
        """Drains; the exit status. buildah would kill its child, so that is told itself."""
        inner = next((pid for pid in _descendants(self.process.pid) if _is_quire(pid)), self.process.pid)
        os.kill(inner, signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
        finally:
            self.builder.buildah("rm", self.container)


def _descendants(pid: int) -> Iterator[int]:
    """Parents before their children, whichever thread started them."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from _descendants(child)


def _is_quire(pid: int) -> bool:
    """The service itself, as opposed to those who run it, whose arguments name it as well."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/opt/quire/bin/python")
    except OSError:
        return False
