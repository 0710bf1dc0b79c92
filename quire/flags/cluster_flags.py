"""Flags of a cluster: the launcher's own, and those service settings that the launcher does not set itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.cluster import ClusterOptions, checkpoint_settings
from quire.flags import vllm_flags
from quire.flags.groups import GROUPS
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import add_setting, human_int
from quire.shared.errors import InvalidArgument
from quire.shared.settings import SERVICES, Settings
from quire.shared.settings.base import AGREED

# Settings that the launcher determines.
MANAGED = {
    "id", "role", "host", "advertise", "model", "revision", "served_model_name", "served_model_aliases",
    "grpc_port", "http_port", "metrics_port", "share_ports", "scheduler", "schedulers", "redis", "admin_port",
    "metrics_host", "cluster_secret_file", "insecure",
}  # fmt: skip
COMMON = set(Settings.model_fields) - MANAGED
OWNERS = ("worker", "scheduler", "frontend")  # a flag for a setting of several services belongs to the first


def configure(parser: CommandParser) -> None:
    """Adds all flags of `quire up`, in groups, with --config and vLLM's flags."""
    add(parser)
    parser.take_config_file()
    parser.group_flags(GROUPS)
    vllm_flags.add(parser)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a cluster's options, also for other commands that start one."""
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder, GGUF file, or ORG/NAME on a hub",
    )
    parser.add_argument("--revision", default="", help="branch, tag or commit of a model on a hub")
    parser.add_argument("--model", dest="named_model", default="", help=argparse.SUPPRESS)  # vLLM's spelling
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="name that requests use; default: the model's own",
    )
    parser.add_argument(
        "--workers",
        "--data-parallel-size",
        type=human_int,
        default=None,
        help="workers, each a replica of the model (default: 1, or 0 with --prefill-workers and --decode-workers)",
    )
    parser.add_argument(
        "--prefill-workers",
        type=human_int,
        default=0,
        help="workers that compute long prompts and hand the KV to decode workers",
    )
    parser.add_argument(
        "--decode-workers", type=human_int, default=0, help="workers that decode the prompts of prefill workers"
    )
    parser.add_argument(
        "--encode-workers",
        type=human_int,
        default=0,
        help="workers that encode pictures for the others, without language weights and KV cache",
    )
    parser.add_argument("--frontends", type=human_int, default=1, help="frontend processes, on the same ports")
    parser.add_argument("--schedulers", type=human_int, default=1, help="scheduler processes")
    _add_addresses(parser)
    _add_joining(parser)
    parser.add_argument(
        "--redis", default="auto", metavar="URL|embedded|none", help="Redis for the prefix index and shared state"
    )
    for service, name in settings_by_flag():
        field, also = SERVICES[service].model_fields[name], checkpoint_settings.NAMES.get(name, ())
        add_setting(parser, name, field, dest=f"{service}.{name}", also=also)


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the addresses that frontends, their admin service and the metrics page listen on."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that frontends listen on (with --join: the workers); 0.0.0.0: all interfaces",
    )
    parser.add_argument(
        "--http-port", "--port", type=human_int, default=8000, help="port of the HTTP APIs; 0: any free port"
    )
    parser.add_argument("--grpc-port", type=human_int, default=50051, help="port of the gRPC API; 0: any free port")
    parser.add_argument(
        "--admin-port", type=human_int, default=0, help="port of the first frontend's admin service; 0: any free port"
    )
    parser.add_argument(
        "--metrics-port",
        type=human_int,
        default=None,
        help="port of /metrics of the whole cluster; the services' own follow it; 0: any free ports; "
        "default: 9101, if it is free",
    )
    parser.add_argument(
        "--metrics-targets-file",
        default="",
        metavar="FILE",
        help="file to write with the services' addresses, for Prometheus's file_sd_configs",
    )


def _add_joining(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that workers on several machines need: cluster to join, secret, and the schedulers' address."""
    parser.add_argument(
        "--join",
        default="",
        metavar="HOST:PORT,...",
        help="start workers only, for the cluster whose `quire up` printed scheduler=HOST:PORT; with "
        "--cluster-secret-file, and the same model",
    )
    parser.add_argument(
        "--cluster-secret-file",
        default="",
        metavar="FILE",
        help="file with the cluster's secret (openssl rand -hex 32), for workers that join; default: that of "
        "QUIRE_*_CLUSTER_SECRET_FILE or of the settings file, otherwise a generated one",
    )
    parser.add_argument(
        "--scheduler-host",
        default="127.0.0.1",
        help="address that schedulers and workers listen on, for workers of other machines; 0.0.0.0: all interfaces",
    )
    parser.add_argument(
        "--scheduler-port",
        type=human_int,
        default=0,
        help="port of the first scheduler; the others' follow it; 0: any free ports",
    )


def settings_by_flag() -> list[tuple[str, str]]:
    """Returns (service, field) for every flag that sets a service's setting."""
    seen: set[str] = set(MANAGED)
    pairs = []
    for service in OWNERS:
        for name in SERVICES[service].model_fields:
            if name not in seen:
                seen.add(name)
                pairs.append((service, name))
    return pairs


def options(arguments: argparse.Namespace) -> ClusterOptions:
    """Converts parsed flags to cluster options. Flags named service.setting become settings of that service, common
    ones of all services, agreed ones of all that have them."""
    values = vars(arguments)
    settings: dict[str, dict[str, Any]] = {service: {} for service in SERVICES}
    for dest, value in values.items():
        service, _, name = dest.partition(".")
        if not name:
            continue
        for target in SERVICES if name in COMMON else (service,):
            settings[target][name] = value
        for target in OWNERS if name in AGREED else ():
            if name in SERVICES[target].model_fields:
                settings[target][name] = value
    model, (served_model_name, *aliases) = names(values)
    if aliases:
        settings["frontend"]["served_model_aliases"] = tuple(aliases)
    return ClusterOptions(
        model=model,
        revision=values["revision"],
        served_model_name=served_model_name,
        workers=num_workers(values),
        prefill_workers=values["prefill_workers"],
        decode_workers=values["decode_workers"],
        encode_workers=values["encode_workers"],
        frontends=values["frontends"],
        schedulers=values["schedulers"],
        host=values["host"],
        http_port=values["http_port"],
        grpc_port=values["grpc_port"],
        admin_port=values["admin_port"],
        metrics_port=values["metrics_port"],
        metrics_targets_file=values["metrics_targets_file"],
        scheduler_host=values["scheduler_host"],
        scheduler_port=values["scheduler_port"],
        cluster_secret_file=values["cluster_secret_file"],
        join=values["join"],
        redis=values["redis"],
        settings=settings,
    )


def names(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the model and the names that requests use, at least one, which may be empty. A flag that takes several
    names, as in vLLM, also takes a MODEL that follows it. Raises InvalidArgument for two models."""
    models = [name for name in (values["model"], values["named_model"]) if name]
    served = [*(values["served_model_name"] or [""])]
    if len(served) > 1 and not models:
        models.append(served.pop())
    if len(models) > 1:
        raise InvalidArgument(
            f"model: a cluster serves one model, got {' and '.join(map(repr, models))}; give one", field="model"
        )
    return models[0] if models else "", served


def num_workers(values: Mapping[str, Any]) -> int:
    """Returns the numbers of workers with both roles, prefill and decode."""
    if values["workers"] is not None:
        return int(values["workers"])
    return 0 if values["prefill_workers"] or values["decode_workers"] else 1
