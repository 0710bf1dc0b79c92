"""The cluster of a script or a notebook: started for it, or an existing one."""

from __future__ import annotations

import os
from typing import IO, Any

from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.metrics import Metric, parse
from quire.offline.lora import LoadedAdapters
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.settings import SERVICES
from quire.shared.settings.base import AGREED

ADMIN = ("admin_address", "admin_key_file")


class EmbeddedCluster:
    """Starts frontend, scheduler and worker on free ports, or connects to the cluster at `address`.

    settings: those of the services by name, for example `device="cuda"`, `num_blocks=64`, or `worker={"threads": 2}`
    for a name that several services have. Raises InvalidArgument for unknown ones. `admin_address`,
    `admin_key_file`: for operators' methods if the cluster at `address` does not run on this machine as this user
    (Client).
    """

    def __init__(
        self, model: str = "", *, address: str = "", workers: int = 1, log: IO[Any] | None = None, **settings: Any
    ) -> None:
        """Returns once the cluster is ready. `model`: folder, GGUF file or ORG/NAME on a hub, empty for the bundled
        model; `workers`: number of worker processes; `log`: stream for the services' logs, None discards them. With
        `address`, HOST:PORT of gRPC, nothing is started, and `model` and settings other than `api_key` and the
        operators' raise InvalidArgument. Raises QuireError if a service does not start."""
        self._cluster: Cluster | None = None
        self._sink: IO[Any] | None = None
        self.address = address
        self._api_key = str(settings.get("api_key", ""))
        operators = {name: settings.pop(name) for name in ADMIN if address and name in settings}
        if address:
            settings.pop("api_key", None)
        if not address:
            options = ClusterOptions(
                model=model, workers=workers, http_port=0, grpc_port=0, settings=by_service(settings)
            )
            if log is None:
                log = self._sink = open(os.devnull, "w")  # noqa: SIM115 (closed in _stop())
            self._start(options, log)
        elif model or settings:
            raise InvalidArgument(
                f"address: {address!r} names a running cluster, for which model and settings cannot be given: leave "
                f"out {', '.join([*(['model'] if model else []), *settings])}",
                field="address",
            )
        self._blocking = Client(self.address, api_key=self._api_key, **operators)
        self._adapters = LoadedAdapters(self._blocking)

    def _start(self, options: ClusterOptions, log: IO[Any]) -> None:
        """Starts a cluster that logs to `log` and stores its address; on any exception it is stopped before the
        exception is raised again."""
        self._cluster = Cluster(options, log=log, report=lambda _line: None)
        try:
            self._cluster.start()
        except BaseException:
            self._stop()
            raise
        self.address = self._cluster.grpc_address

    def get_metrics(self) -> list[Metric]:
        """Returns the metrics of all services. Raises FailedPrecondition for a cluster that was not started here."""
        if self._cluster is None or self._cluster.metrics is None:
            raise FailedPrecondition(
                f"get_metrics: the cluster at {self.address} was not started by this program; read its /metrics"
            )
        return parse(self._cluster.metrics.text())

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as transformers provides it. Raises FailedPrecondition for a cluster that
        was not started here, whose model may be elsewhere: use client.tokenize instead."""
        if self._cluster is None:
            raise FailedPrecondition(
                f"get_tokenizer: the cluster at {self.address} was not started by this program, and its model may be "
                "elsewhere; use client.tokenize()"
            )
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._cluster.options.model_folder))

    def _stop(self) -> None:
        """Stops the cluster and closes its log, if this object started one; may be called again."""
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
        if self._sink is not None:
            self._sink.close()


def by_service(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups settings by service; a value may be a dict under a service's name. Raises InvalidArgument for unknown
    ones."""
    sections: dict[str, dict[str, Any]] = {service: dict(settings.pop(service, {})) for service in SERVICES}
    for name, value in settings.items():
        owners = [service for service, model in SERVICES.items() if name in model.model_fields]
        if not owners:
            raise InvalidArgument(f"unknown setting {name}={value!r}; the settings reference lists all", field=name)
        owner = "worker" if "worker" in owners else owners[0]
        for target in owners if name in AGREED else (owner,):
            sections[target].setdefault(name, value)
    return sections
