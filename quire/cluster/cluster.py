"""Starts, supervises and drains the processes of a cluster on this machine."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from quire.cluster.checkpoint_settings import without_redundant_settings
from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_page import ClusterPage, ScrapeTarget, write_discovery
from quire.cluster.metrics_ports import MetricsPorts
from quire.cluster.options import EVERYWHERE, ClusterOptions, Spec, check_model, more_workers, plan
from quire.cluster.process import Report, ServiceProcess
from quire.shared.errors import FailedPrecondition, Unavailable
from quire.shared.logs import print_line
from quire.shared.metrics.cluster_load import WORKERS
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import build

WATCH_INTERVAL_S = 0.1
START_TIMEOUT_S = 600.0
KNOWN_WITHIN_S = 5.0  # not an error if exceeded: frontend and worker may be unable to communicate
DRAIN_TIMEOUT_S = 40.0
STOP_ORDER = ("frontend", "worker", "scheduler", "redis")  # upstream first: a draining service needs those downstream


class StartAborted(Exception):
    """The start was cancelled by abort_start()."""


class Cluster:
    """A cluster: `with Cluster(options) as cluster:` serves until the block ends, then drains."""

    def __init__(self, options: ClusterOptions, log: IO[Any] | None = None, report: Report | None = None) -> None:
        self.options = options
        self._report = report or (lambda line: print_line(f"quire: {line}", sys.stderr))
        self._log = log
        self._endpoints = Endpoints()
        self._metrics_ports: MetricsPorts | None = None
        self.metrics: ClusterPage | None = None  # set by start()
        self.specs: list[Spec] = []
        self.processes: list[ServiceProcess] = []
        self._given_up = False
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        # A signal that interrupts the main thread must not leave a child that is forked but not yet recorded.
        self._starter = ThreadPoolExecutor(1, "starter")
        self._forking = threading.RLock()  # an interrupted executor does not wait for a thread that it was creating

    @property
    def http_address(self) -> str:
        return self._with_role("frontend")[0].addresses["http"]

    @property
    def grpc_address(self) -> str:
        return self._with_role("frontend")[0].addresses["grpc"]

    @property
    def addresses(self) -> dict[str, str]:
        """Returns the cluster's addresses by kind (http, grpc, metrics, ...), as printed by `quire up`; a cluster
        that joined another has only metrics, scheduler and workers."""
        assert self.metrics is not None
        if self.options.join:
            names = ",".join(process.spec.id for process in self._with_role("worker"))
            return {"metrics": self.metrics.address, "scheduler": self.options.join, "workers": names}
        schedulers = [process.addresses["grpc"] for process in self._with_role("scheduler")]
        return {
            "http": self.http_address,
            "grpc": self.grpc_address,
            "metrics": self.metrics.address,
            "scheduler": ",".join(schedulers),
            "url": self._url(),
        }

    def _url(self) -> str:
        """Returns the URL for browsers on this machine."""
        host, _, port = self.http_address.rpartition(":")
        if self.options.host in EVERYWHERE:
            host = "localhost"
        elif ":" in host and not host.startswith("["):
            host = f"[{host}]"
        scheme = "https" if self._tls("frontend", "client_tls").serves else "http"
        return f"{scheme}://{host}:{port}"

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts all services and returns when they are ready. Raises QuireError for a port in use, Unavailable if a
        service refuses to start, StartAborted if abort_start() was called meanwhile."""
        atexit.register(self.stop)
        try:
            self.options = without_redundant_settings(self.options.located())
            check_model(self.options)
            ports = self._metrics_ports = MetricsPorts(self._endpoints, self.options.metrics_port)
            self.specs = plan(self.options, self._endpoints, ports)
            self.metrics = ClusterPage(ports.of_cluster, self._targets, self._tls())
            self.processes = [ServiceProcess(spec, self._report, self._log) for spec in self.specs]
            self._starter.submit(self._start_processes).result()
            self._await_ready(time.monotonic() + timeout_s)
            self._await_workers_known()
            self._write_targets()
        except BaseException:
            self.kill()
            raise
        self._watcher.start()

    def abort_start(self) -> bool:
        """Cancels a start from a signal handler; returns whether there are processes, which start() will then end."""
        self._given_up = True
        if not self.processes:
            self._endpoints.close()
        return bool(self.processes)

    def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Drains: frontends finish their requests, then workers and schedulers exit. No process remains."""
        if self._stopping.is_set():
            return
        try:
            self._drain(drain_timeout_s)
        except BaseException:  # an interrupted drain must still end the processes
            self.kill()
            raise
        self._close_endpoints()

    def _drain(self, drain_timeout_s: float) -> None:
        """Stops the processes role by role in STOP_ORDER with SIGTERM; each role has `drain_timeout_s` seconds,
        after which its processes are killed."""
        self._stop_starting()
        atexit.unregister(self.stop)
        if self._watcher.is_alive():
            self._watcher.join()
        for role in STOP_ORDER:
            deadline = time.monotonic() + drain_timeout_s
            for process in self._with_role(role):
                process.signal(signal.SIGTERM)
            for process in self._with_role(role):
                if not process.wait(max(0.1, deadline - time.monotonic())):
                    self._report(f"{process.spec.id} did not drain in time; killing it")
                process.close()

    def scale_workers(self, count: int) -> None:
        """Starts workers or drains the last ones until there are `count`; returns when done."""
        workers = self._with_role("worker")
        for process in workers[count:]:
            self.processes.remove(process)  # no longer supervised
            process.signal(signal.SIGTERM)
        for process in workers[count:]:
            process.wait(DRAIN_TIMEOUT_S)
            process.close()
        assert self._metrics_ports is not None
        specs = more_workers(self.options, self.specs, range(len(workers), count), self._metrics_ports)
        added = [ServiceProcess(spec, self._report, self._log) for spec in specs]
        for process in added:
            process.start()
        self.processes += added
        self._await_ready(time.monotonic() + START_TIMEOUT_S)
        self._write_targets()

    def process(self, name: str) -> ServiceProcess:
        """Returns the process of a service, by id."""
        return next(process for process in self.processes if process.spec.id == name)

    def kill(self) -> None:
        """Kills all processes at once, without draining, and removes sockets and folders."""
        self._stop_starting()
        atexit.unregister(self.stop)
        for process in self.processes:
            process.close()
        self._close_endpoints()

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def _targets(self) -> list[ScrapeTarget]:
        known = [process for process in list(self.processes) if process.spec.role != "redis"]
        return [ScrapeTarget(p.spec.role, p.spec.id, p.addresses.get("metrics", "")) for p in known]

    def _write_targets(self) -> None:
        """Updates the scrape targets file. Raises FailedPrecondition if it cannot be written."""
        path = self.options.metrics_targets_file
        if path and self.metrics is not None:
            try:
                write_discovery(Path(path), self.metrics.discovery())
            except OSError as error:
                message = f"metrics_targets_file: cannot write {path!r}: {error.strerror}"
                raise FailedPrecondition(message, field="metrics_targets_file") from None

    def _tls(self, service: str = "scheduler", name: str = "tls") -> Tls:
        """Returns a TLS setting of a service; without names, the one that all metrics pages share."""
        given = self.options.settings.get(service, {}).get(name, NO_TLS)
        return given if isinstance(given, Tls) else build(Tls, given, name)

    def _close_endpoints(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self._endpoints.close()

    def _with_role(self, role: str) -> list[ServiceProcess]:
        return [process for process in self.processes if process.spec.role == role]

    def _start_processes(self) -> None:
        """Starts all processes, except after `stop` or an aborted start."""
        for process in self.processes:
            with self._forking:
                if not self._stopping.is_set() and not self._given_up:
                    process.start()

    def _stop_starting(self) -> None:
        """Prevents further starts and restarts, and waits for a fork in progress, so that every child is recorded
        afterwards."""
        self._stopping.set()
        self._starter.shutdown()
        with self._forking:
            pass

    def _await_ready(self, deadline: float) -> None:
        """Waits until every process is ready. Raises StartAborted if the start was given up, and Unavailable if a
        process ends or the deadline (monotonic seconds) passes."""
        for process in self.processes:
            while not process.ready.wait(0.02):
                if self._given_up:
                    raise StartAborted
                for other in self.processes:
                    if other.exit_status is not None:
                        raise _not_ready(other)
                if time.monotonic() > deadline:
                    raise Unavailable(f"{process.spec.id} was not ready in time; its log says what it waits for")

    def _await_workers_known(self) -> None:
        """Waits until frontends know the first worker, whose capabilities they learn a moment after it is ready."""
        assert self.metrics is not None
        until_s = time.monotonic() + KNOWN_WITHIN_S
        frontends = self._with_role("frontend") if self._with_role("worker") else []
        for process in frontends:
            while not self.metrics.sample(process.spec.id, WORKERS) and time.monotonic() < until_s:
                if self._given_up:
                    raise StartAborted
                time.sleep(0.02)

    def _watch(self) -> None:
        """Restarts processes that have ended, in a thread, until the cluster stops; failed starts are reported and
        retried."""
        while not self._stopping.wait(WATCH_INTERVAL_S):
            for process in list(self.processes):
                try:
                    process.watch(time.monotonic())
                except OSError as error:  # out of memory or processes: retried in the next round
                    self._report(f"{process.spec.id} cannot be started: {error}")


def _not_ready(process: ServiceProcess) -> Unavailable:
    """Returns an error that names the process and its last output, because a script may not show the log."""
    reason = f": {process.reason}" if process.reason else ""
    return Unavailable(f"{process.spec.id} ended with status {process.exit_status} before it was ready{reason}")
