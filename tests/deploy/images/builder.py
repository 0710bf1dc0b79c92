"""Builds the images from the Dockerfile without a Docker engine: buildah in a chroot, on bases that mmdebstrap
creates from Debian packages."""

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

from quire.shared.build_commit import commit
from quire.shared.version import VERSION
from tests.deploy.images import runtime_base
from tests.deploy.paths import DOCKERFILE, ROOT

BASE, RUNTIME = "localhost/quire-base", "localhost/quire-runtime"
SUITE = "bookworm"
PACKAGES = (*runtime_base.ROOTS, "python3-venv")
MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"  # otherwise a package does it, by means of all of Perl


@dataclass(frozen=True, slots=True)
class Image:
    """An image; its stage has its name; `extras`: of pyproject.toml."""

    role: str
    extras: tuple[str, ...]
    suffix: str = ""

    @property
    def name(self) -> str:
        return self.role + self.suffix

    @property
    def tag(self) -> str:
        return f"localhost/quire-{self.role}:test{self.suffix}"

    @property
    def published(self) -> str:
        """Returns the name used by manifests and compose."""
        return f"quire-{self.role}:{VERSION}{self.suffix}"


FRONTEND = Image("frontend", ("frontend",))
SCHEDULER = Image("scheduler", ("scheduler",))
WORKER = Image("worker", ("worker",))
WORKER_CUDA = Image("worker", ("worker", "cuda"), suffix="-cuda")
IMAGES = {image.name: image for image in (FRONTEND, SCHEDULER, WORKER, WORKER_CUDA)}


class Builder:
    """Builds images in `folder`, which may be deleted afterwards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._storage = ("--storage-driver", "vfs", "--root", f"{folder}/storage", "--runroot", f"{folder}/run")

    def buildah(self, *words: str) -> str:
        """Runs buildah and returns its output; its stderr is passed on."""
        done = subprocess.run(
            ["buildah", *self._storage, *words], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
        )
        return done.stdout.strip()

    def make_bases(self) -> None:
        """Creates the bases: Debian with Python and this machine's certificates, and the minimal runtime."""
        full, small = self.folder / "base.tar", self.folder / "runtime.tar"
        if not full.exists():
            trusted = "/etc/ssl/certs/ca-certificates.crt"
            words = [f"--dpkgopt=path-exclude=/usr/share/{room}/*" for room in ("doc", "man", "locale")]
            words += [f"--hook-dir={MERGED_USR}", f"--customize-hook=copy-in {trusted} {Path(trusted).parent}"]
            include = f"--include={','.join(PACKAGES)}"
            subprocess.run(["mmdebstrap", "--variant=minbase", include, *words, SUITE, str(full)], check=True)
        runtime_base.select(full, small)
        for tar, name in ((full, BASE), (small, RUNTIME)):
            container = self.buildah("from", "scratch")
            self.buildah("add", "--quiet", container, str(tar), "/")
            self.buildah("commit", "--quiet", "--rm", container, name)

    def build(self, image: Image, arguments: Mapping[str, str]) -> float:
        """Builds an image; returns the seconds it took."""
        began = time.monotonic()
        words = ["bud", "--isolation", "chroot", "--format", "docker", "--quiet"]
        words += ["--file", str(DOCKERFILE), "--tag", image.tag]
        words += ["--target", image.name]
        bases = {"BASE": BASE, "RUNTIME": arguments.get("BASE", RUNTIME)}  # whose Pythons have to be the same
        for name, value in {**bases, "QUIRE_COMMIT": commit(), **arguments}.items():
            words += ["--build-arg", f"{name}={value}"]
        self.buildah(*words, ".")
        return time.monotonic() - began

    def layers(self, tag: str) -> list[int]:
        """Returns the unpacked bytes of each layer: the base, then Quire's."""
        manifest = json.loads(json.loads(self.buildah("inspect", "--type", "image", tag))["Manifest"])
        return [layer["size"] for layer in manifest["layers"]]

    @contextmanager
    def unpacked(self, image: Image) -> Iterator[Path]:
        """Returns the root folder of an image's files."""
        with self.container(image) as container:
            yield Path(self.buildah("mount", container))

    def start(self, image: Image, command: Sequence[str], *, files: Path, environment: Mapping[str, str]) -> Service:
        """Starts a process in a container of the image; `files` are mounted at /etc/quire."""
        container = self.buildah("from", image.tag)
        words = [*self._run(files, environment), container, "--", "quire", *command]
        return Service(self, container, subprocess.Popen(words, start_new_session=True))

    @contextmanager
    def container(self, image: Image) -> Iterator[str]:
        container = self.buildah("from", image.tag)
        try:
            yield container
        finally:
            self.buildah("rm", container)

    def call(
        self, container: str, command: Sequence[str], *, files: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command` in the container and waits for it."""
        words = [*self._run(files, environment or {}), container, "--", *command]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def push(self, image: Image, destination: str) -> str:
        """Pushes to a destination in the notation of containers-transports(5); returns the digest."""
        written = self.folder / f"quire-{image.name}.digest"
        self.buildah("push", "--quiet", "--digestfile", str(written), image.tag, destination)
        return written.read_text().strip()

    def _run(self, files: Path, environment: Mapping[str, str]) -> list[str]:
        words = ["buildah", *self._storage, "run", "--isolation", "chroot", "--user", "10001:10001"]
        words += ["--volume", f"{files}:/etc/quire:ro"]
        for name, value in environment.items():
            words += ["--env", f"{name}={value}"]
        return words


@dataclass(frozen=True, slots=True)
class Service:
    """A running container; must be stopped."""

    builder: Builder
    container: str
    process: subprocess.Popen[bytes]

    def stop(self) -> int:
        """Drains and returns the exit status. The signal is sent to the service itself, because buildah would kill
        it."""
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
    """Yields descendants, parents before children."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from _descendants(child)


def _is_quire(pid: int) -> bool:
    """Whether a process is the service itself rather than a wrapper whose arguments contain its name."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/opt/quire/bin/python")
    except OSError:
        return False
