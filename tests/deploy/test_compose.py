"""docker-compose.yml is valid, its settings are accepted by the services, and it supports several workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import FrontendSettings, Settings, WorkerSettings
from quire.shared.version import VERSION
from tests.deploy import dockerfile, service
from tests.deploy.paths import COMPOSE, DOCKERFILE, PROMETHEUS, ROOT

QUIRE = ("frontend", "scheduler", "worker", "worker-encode", "worker-cuda")
OTHERS = ("redis", "prometheus", "grafana")
ONCE = ("secrets",)


def interpolated(text: str) -> str:
    """Substitutes variables, none of which is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(interpolated(COMPOSE.read_text()))
    return document


@pytest.fixture
def settings(compose: dict[str, Any], tmp_path: Path) -> dict[str, Settings]:
    return {name: described(compose, name).settings(tmp_path) for name in QUIRE}


def described(compose: dict[str, Any], name: str) -> service.Service:
    """Returns the container: its image's environment, then compose's."""
    entry = compose["services"][name]
    stage = dockerfile.target(DOCKERFILE, entry["build"]["target"])
    environment = {**stage.environment, **{key: str(value) for key, value in entry["environment"].items()}}
    (config,) = entry["configs"]
    assert config["target"] == service.CONFIG_PATH
    return service.Service(
        stage.words("CMD") if "command" not in entry else entry["command"],
        {key: value for key, value in environment.items() if key.startswith("QUIRE_")},
        (ROOT / compose["configs"][config["source"]]["file"]).read_text(),
        float(entry["stop_grace_period"].removesuffix("s")),
    )


def test_fits_the_compose_specification(compose: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(yaml.safe_dump(compose))
    for path in (COMPOSE, tmp_path / "compose.yml"):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_has_the_services_of_a_cluster(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {*QUIRE, *OTHERS, *ONCE}


def test_no_variable_of_its_own_can_be_taken_for_a_setting() -> None:
    assert not re.findall(r"\$\{QUIRE_\w*", COMPOSE.read_text())


@pytest.mark.parametrize("name", QUIRE)
def test_settings_are_accepted(compose: dict[str, Any], name: str, tmp_path: Path) -> None:
    container = described(compose, name)
    service.check(container.settings(tmp_path), container.stop_after_s)


@pytest.mark.parametrize("name", QUIRE)
def test_image_is_the_one_that_is_built(compose: dict[str, Any], name: str) -> None:
    entry = compose["services"][name]
    target = "worker" if name == "worker-encode" else name
    role, _, flavour = target.partition("-")
    assert entry["image"] == f"quire-{role}:{VERSION}" + (f"-{flavour}" if flavour else "")
    assert entry["build"]["target"] == target
    assert "dockerfile" not in entry["build"]


def test_services_find_each_other_by_name(settings: dict[str, Settings]) -> None:
    scheduler = f"scheduler:{settings['scheduler'].grpc_port}"  # type: ignore[attr-defined]
    for found in settings.values():
        if isinstance(found, WorkerSettings):
            assert found.scheduler == scheduler
        if isinstance(found, FrontendSettings):
            assert found.schedulers == (scheduler,)


def test_secrets_are_made_before_anybody_starts_and_only_once(compose: dict[str, Any], tmp_path: Path) -> None:
    job = compose["services"]["secrets"]
    for name in ("redis", "scheduler"):  # the others wait for the scheduler
        assert compose["services"][name]["depends_on"]["secrets"]["condition"] == "service_completed_successfully"
    (script,) = job["command"]
    for name in ("trust", "redis"):
        (tmp_path / name).mkdir()
    here = script.replace("/trust/", f"{tmp_path}/trust/").replace("/redis/", f"{tmp_path}/redis/")
    here = here.replace("chown", "true")
    made = []
    for _ in range(2):
        subprocess.run([*job["entrypoint"], here], check=True)
        made.append({name: (tmp_path / name).read_text() for name in ("trust/cluster-secret", "trust/redis-password")})
    assert made[0] == made[1]
    assert len(set(made[0].values())) == 2
    for name, secret in made[0].items():
        assert SecretFile(str(tmp_path / name), "file").first == secret.encode()
    password = made[0]["trust/redis-password"]
    assert (tmp_path / "redis/redis.conf").read_text() == f"requirepass {password}\n"


def test_services_show_the_secrets_that_are_made(compose: dict[str, Any], settings: dict[str, Settings]) -> None:
    for name, found in settings.items():
        assert "trust:/run/quire:ro" in compose["services"][name]["volumes"]
        assert found.cluster_secret_file == "/run/quire/cluster-secret"
        if name in ("frontend", "scheduler"):
            assert found.redis_password_file == "/run/quire/redis-password"
    assert "redis:/run/redis:ro" in compose["services"]["redis"]["volumes"]


@pytest.mark.parametrize("name", ["worker", "worker-encode", "worker-cuda"])
def test_workers_can_be_many(compose: dict[str, Any], name: str) -> None:
    entry = compose["services"][name]
    assert not {"container_name", "hostname", "ports"} & set(entry)
    assert not {"QUIRE_WORKER_ID", "QUIRE_WORKER_ADVERTISE"} & set(entry["environment"])


def test_gpus_are_asked_for_in_a_profile_only(compose: dict[str, Any]) -> None:
    with_devices = {name for name, entry in compose["services"].items() if "deploy" in entry}
    assert with_devices == {"worker-cuda"}
    assert compose["services"]["worker-cuda"]["profiles"] == ["cuda"]


def test_ports_of_the_host_lead_to_ports_of_services(compose: dict[str, Any], settings: dict[str, Settings]) -> None:
    frontend = compose["services"]["frontend"]
    assert {int(port.rsplit(":", 1)[1]) for port in frontend["ports"]} == service.ports(settings["frontend"])
    for name in ("scheduler", "worker", "worker-encode", "worker-cuda"):
        assert {int(port) for port in compose["services"][name]["expose"]} == service.ports(settings[name])
    published = [port for entry in compose["services"].values() for port in entry.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published), "not for everybody by default"


@pytest.mark.parametrize("name", [*QUIRE, *OTHERS])
def test_every_container_says_whether_it_is_well(compose: dict[str, Any], name: str) -> None:
    entry = compose["services"][name]
    if name in OTHERS:
        assert entry["healthcheck"]["test"][0] == "CMD"
    else:
        assert dockerfile.target(DOCKERFILE, entry["build"]["target"]).health_command


@pytest.mark.parametrize("name", [*QUIRE, *OTHERS])
def test_every_container_is_locked_down(compose: dict[str, Any], name: str) -> None:
    entry = compose["services"][name]
    assert entry["read_only"]
    assert entry["cap_drop"] == ["ALL"]
    assert entry["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in entry
    assert re.search(r":v?\d", entry["image"]), "pinned"
    assert "." not in entry["image"].split(":")[0], "from where Docker looks first"


def test_services_wait_for_those_they_need(compose: dict[str, Any]) -> None:
    waits = {name: entry.get("depends_on", {}) for name, entry in compose["services"].items()}
    assert waits["scheduler"]["redis"]["condition"] == "service_healthy"
    for name in ("frontend", "worker", "worker-encode", "worker-cuda"):
        assert waits[name]["scheduler"]["condition"] == "service_healthy"
    optional = [name for name, entry in compose["services"].items() if "profiles" in entry]
    for needed in waits.values():
        assert all(needed[name]["required"] is False for name in optional if name in needed)


def test_what_is_mounted_exists(compose: dict[str, Any]) -> None:
    for entry in compose["services"].values():
        for mount in entry.get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], mount


def test_prometheus_asks_every_service_where_it_answers(compose: dict[str, Any], settings: dict[str, Settings]) -> None:
    document = yaml.safe_load((PROMETHEUS / "compose.yml").read_text())
    asked = {
        name: config["port"]
        for job in document["scrape_configs"]
        for config in job["dns_sd_configs"]
        for name in config["names"]
    }
    assert asked == {name: service.metrics_port(settings[name]) for name in QUIRE}
