"""What a cluster on one machine consists of."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import bundled
from shared.errors import InvalidArgument

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """`settings` are those of the services, by service and field; they go to every process of that service."""

    model: str = ""  # Hugging Face folder; empty: the bundled model
    workers: int = 1
    frontends: int = 1
    schedulers: int = 1
    host: str = LOOPBACK
    http_port: int = 8000  # 0: any free one
    grpc_port: int = 50051  # 0: any free one
    redis: str = "none"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def model_folder(self) -> Path:
        return Path(self.model).expanduser() if self.model else bundled.FOLDER

    @property
    def model_name(self) -> str:
        return self.model_folder.resolve().name if self.model else bundled.NAME


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process: which service, under which name, with which flags."""

    role: str
    id: str
    flags: Mapping[str, Any]

    def arguments(self) -> Iterator[str]:
        yield self.role
        for name, value in self.flags.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                yield flag if value else f"--no-{flag[2:]}"
            else:
                yield from (flag, _as_text(value))


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def plan(options: ClusterOptions) -> list[ServiceSpec]:
    """The processes of a cluster. Ports are chosen here, so that a restarted service keeps its own."""
    if options.schedulers != 1:
        raise InvalidArgument(f"schedulers: must be 1, got {options.schedulers}", field="schedulers")
    for name in ("workers", "frontends"):
        if getattr(options, name) < 1:
            raise InvalidArgument(f"{name}: must be at least 1, got {getattr(options, name)}", field=name)
    scheduler = f"{LOOPBACK}:{free_port()}"
    specs = [_scheduler(options, scheduler)]
    specs += [_worker(options, i, scheduler) for i in range(options.workers)]
    http_port, grpc_port = options.http_port or free_port(), options.grpc_port or free_port()
    specs += [_frontend(options, i, scheduler, http_port, grpc_port) for i in range(options.frontends)]
    return specs


def _scheduler(options: ClusterOptions, address: str) -> ServiceSpec:
    port = int(address.rsplit(":", 1)[1])
    flags = {"id": "scheduler-0", "grpc_port": port, "metrics_port": 0, **options.settings.get("scheduler", {})}
    return ServiceSpec("scheduler", "scheduler-0", flags)


def _worker(options: ClusterOptions, index: int, scheduler: str) -> ServiceSpec:
    name = f"worker-{index}"
    flags = {
        "id": name,
        "model": options.model_folder,
        "served_model_name": options.model_name,
        "scheduler": scheduler,
        **options.settings.get("worker", {}),
    }
    return ServiceSpec("worker", name, flags)


def _frontend(options: ClusterOptions, index: int, scheduler: str, http_port: int, grpc_port: int) -> ServiceSpec:
    name = f"frontend-{index}"
    flags = {
        "id": name,
        "model": options.model_folder,
        "served_model_name": options.model_name,
        "host": options.host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "share_ports": options.frontends > 1,
        "schedulers": (scheduler,),
        **options.settings.get("frontend", {}),
    }
    return ServiceSpec("frontend", name, flags)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
