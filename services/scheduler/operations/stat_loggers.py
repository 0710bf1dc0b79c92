"""Periodic statistics of every worker: a log line, and stat loggers of installed packages.

A stat logger is called with the worker's figures of an interval; packages declare theirs in the entry point group
`quire.stat_loggers`, and the setting `stat_loggers` names those that are used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.shared import plugins
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.pb.admin.v1 import admin_pb2 as pb

log = logger("stats")

GROUP = "quire.stat_loggers"
STAT_LOGGERS = {"log": "quire.services.scheduler.operations.stat_loggers:log_line"}


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Figures of one worker over an interval; numbers of sequences and blocks are those at its end."""

    worker: str
    model: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    generated_tokens: int
    preemptions: int
    running: int
    waiting: int
    kv_usage: float  # 0 to 1
    draft_tokens: int = 0
    accepted_tokens: int = 0  # accepted draft tokens

    @property
    def is_idle(self) -> bool:
        return not (self.prompt_tokens or self.generated_tokens or self.running or self.waiting)


StatLogger = Callable[[WorkerStats], None]


def log_line(stats: WorkerStats) -> None:
    """Logs a line with the fields of vLLM's; nothing for an idle worker."""
    if stats.is_idle:
        return
    hits = f"{100 * stats.cached_tokens / stats.prompt_tokens:.1f}%" if stats.prompt_tokens else None
    accepted = f"{100 * stats.accepted_tokens / stats.draft_tokens:.1f}%" if stats.draft_tokens else None
    log.info(
        "throughput",
        worker=stats.worker,
        prompt_tokens_per_s=round(stats.prompt_tokens / stats.seconds, 1),
        generation_tokens_per_s=round(stats.generated_tokens / stats.seconds, 1),
        running=stats.running,
        waiting=stats.waiting,
        kv_cache_usage=f"{100 * stats.kv_usage:.1f}%",
        prefix_cache_hit_rate=hits,
        draft_acceptance_rate=accepted,
        preemptions=stats.preemptions or None,
    )


def find(names: Sequence[str]) -> list[tuple[str, StatLogger]]:
    """Loads the stat loggers with these names; returns (name, logger) pairs. Raises InvalidArgument, which lists the
    existing names, for an unknown one."""
    known = plugins.known(GROUP, STAT_LOGGERS)
    for name in names:
        if name not in known:
            text = f"stat_loggers: {name!r} does not exist; available: {', '.join(known)}"
            raise InvalidArgument(text, field="stat_loggers")
    return [(name, plugins.load(known[name])) for name in names]


class StatsReporter:
    """Reports the figures of all workers every `interval_s`."""

    def __init__(
        self,
        loggers: Sequence[tuple[str, StatLogger]],
        interval_s: float,
        model: Callable[[], str],
        workers: Callable[[], Iterable[pb.ServiceStatus]],
    ) -> None:
        """Stores the loggers and starts the first interval. `model`: returns the model's name; `workers`: returns
        the present status of all workers."""
        self._loggers = list(loggers)
        self._interval_s = interval_s
        self._model = model
        self._workers = workers
        self._before: dict[str, pb.ServiceStatus] = {}  # last status by worker id; counters outlive attachments
        self._last_report_s = time.monotonic()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.report(time.monotonic())

    def report(self, now: float) -> None:
        """Passes the figures of every worker since the last report to the stat loggers. `now`: monotonic seconds."""
        seconds, self._last_report_s = max(now - self._last_report_s, 1e-3), now
        for worker in self._workers():
            before = self._before.get(worker.id, pb.ServiceStatus())
            self._report_worker(_stats(worker, before, self._model(), seconds))
            self._before[worker.id] = worker

    def _report_worker(self, stats: WorkerStats) -> None:
        """Calls every stat logger with the figures; one that raises is logged and disabled."""
        for entry in list(self._loggers):
            name, stat_logger = entry
            try:
                stat_logger(stats)
            except Exception:
                log.exception("a stat logger failed and is disabled", stat_logger=name)
                self._loggers.remove(entry)


def _stats(worker: pb.ServiceStatus, before: pb.ServiceStatus, model: str, seconds: float) -> WorkerStats:
    """Returns the differences between two states of a worker's counters as the figures of an interval of `seconds`."""
    now, then = worker.work, before.work
    return WorkerStats(
        worker=worker.id,
        model=model,
        seconds=seconds,
        prompt_tokens=now.prompt_tokens - then.prompt_tokens,
        cached_tokens=now.cached_tokens - then.cached_tokens,
        generated_tokens=now.generated_tokens - then.generated_tokens,
        preemptions=now.preemptions - then.preemptions,
        running=worker.running,
        waiting=worker.waiting,
        kv_usage=worker.blocks.used / worker.blocks.total if worker.blocks.total else 0.0,
        draft_tokens=worker.drafts.num_draft_tokens - before.drafts.num_draft_tokens,
        accepted_tokens=worker.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens,
    )
