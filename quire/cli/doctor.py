"""`quire doctor`: finds problems that would keep a cluster from serving on this machine, with advice."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from quire import bundled
from quire.cli.connection import (
    ADDRESS_VARIABLE,
    ADMIN_ADDRESS_VARIABLE,
    ADMIN_KEY_VARIABLE,
    add_admin,
    address_of,
    tls_of,
)
from quire.cluster import metrics_ports
from quire.doctor import certificates, cluster, gpu, machine, model, network, secrets
from quire.doctor.finding import Finding, ok, run_check, table
from quire.flags.setting_flags import add_setting, human_int
from quire.shared.errors import InvalidArgument
from quire.shared.settings import SERVICES, FrontendSettings, SchedulerSettings, Settings, WorkerSettings, load

OF_WORKERS = ("device", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
OF_FRONTENDS = ("host", "http_port", "redis", "redis_password_file", "client_tls", "api_keys")
OF_ALL = ("cluster_secret_file",)
FLAGS = ("model", "revision", *OF_WORKERS, *OF_FRONTENDS, *OF_ALL)
S = TypeVar("S", bound=Settings)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the settings that the checks read, and the output format."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as `quire up` takes it")
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file with a section per service"
    )
    for name in FLAGS[1:]:
        owner = WorkerSettings if name in OF_WORKERS else FrontendSettings
        add_setting(parser, name, owner.model_fields[name])
    add_admin(parser)
    parser.add_argument(
        "--metrics-port",
        type=human_int,
        metavar="PORT",
        help=f"as `quire up` takes it; default: {metrics_ports.DEFAULT}, if it is free",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings; returns 1 if any of them is an error."""
    findings = list(examine(arguments))
    is_well = not any(finding.level == "error" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": is_well, "findings": [finding.as_dict() for finding in findings]}))
    else:
        print(table(findings))
    return 0 if is_well else 1


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yields the findings of all checks. Unreadable settings are a finding as well, after which the other checks are
    skipped."""
    advice = "correct the file, the QUIRE_* variable or the flag that it names"
    settings: list[_AllSettings] = []

    def read() -> Iterator[Finding]:
        settings.append(_AllSettings(vars(arguments)))
        yield ok("settings", "settings of frontend, scheduler and worker are valid")

    yield from run_check("settings", read, advice)
    if settings:
        yield from _examine(arguments, settings[0])


class _AllSettings:
    """Settings of the three services as each would load them from flags, environment and file. Raises QuireError for
    invalid ones."""

    def __init__(self, flags: dict[str, Any]) -> None:
        given = {name: flags[name] for name in (*FLAGS, "config") if name in flags}
        self.frontend = _service_settings(FrontendSettings, given)
        self.scheduler = _service_settings(SchedulerSettings, given)
        self.worker = _service_settings(WorkerSettings, given)
        self.model = "" if self.frontend.model == str(bundled.FOLDER) else self.frontend.model


def _service_settings(service: type[S], given: dict[str, Any]) -> S:
    """Returns a service's settings; without a model anywhere, those for the bundled one."""
    own = {name: value for name, value in given.items() if name in service.model_fields or name == "config"}
    try:
        return load(service, SERVICES, own)
    except InvalidArgument as missing:
        if missing.field != "model" or "model" in own:
            raise
        return load(service, SERVICES, {**own, "model": str(bundled.FOLDER)})


def _examine(arguments: argparse.Namespace, settings: _AllSettings) -> Iterator[Finding]:
    """Yields the findings of the checks with readable settings; checks of device and model need the worker's code."""
    frontend, worker = settings.frontend, settings.worker
    place = _place(arguments)
    services = cluster.find(place)
    has_worker = importlib.util.find_spec("quire.services.worker") is not None  # images of other services have none
    yield from machine.check(worker.device, for_workers=has_worker)
    if has_worker:
        yield from gpu.check(worker.device, worker.num_ranks)
    answers_at = place.address if services else ""
    wanted = {"http_port": frontend.http_port, "grpc_port": arguments.grpc_port}
    yield from network.check_ports(frontend.host, wanted, answers_at)
    yield from network.check_metrics_port(arguments.metrics_port, answers_at)
    yield from network.check_redis(frontend)
    yield from certificates.check("client_tls", frontend.client_tls)
    yield from certificates.check("tls", frontend.tls)
    yield from secrets.check((frontend, settings.scheduler, worker))
    yield from secrets.check_api_keys(frontend)
    if has_worker:
        yield from model.check(settings.model, worker.revision, worker.device)
    else:
        yield ok(
            "worker",
            "is not installed; with it (pip install 'quire[worker]'), `quire doctor` also checks device and model",
        )
    yield from cluster.check(place, services)


def _place(arguments: argparse.Namespace) -> cluster.ClusterAddress:
    """Returns the cluster's address from flags and environment, with whether it was named or is the default."""
    return cluster.ClusterAddress(
        address_of(arguments),
        tls_of(arguments),
        arguments.admin_address or os.environ.get(ADMIN_ADDRESS_VARIABLE, ""),
        arguments.admin_key_file or os.environ.get(ADMIN_KEY_VARIABLE, ""),
        is_named=bool(arguments.address or os.environ.get(ADDRESS_VARIABLE)),
    )
