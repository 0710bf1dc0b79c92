"""Plug-in of pytest that reports where processor time goes: by folder, and the most expensive tests.

`make test-costs` loads it. Other than durations, processor time does not depend on what else a machine does, and it
includes the processes that a test starts, also those that zygotes fork (tests/preloaded).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MOST_EXPENSIVE = 20
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
FIRST_TIME, LAST_TIME = 11, 15  # fields of /proc/PID/stat behind the name: user, system, and those of reaped children


def of_descendants(pid: int | str) -> float:
    """Returns the seconds that the living descendants of a process and their reaped children have computed."""
    total = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process or the thread has ended
            for child in file.read_text().split():
                times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[FIRST_TIME:LAST_TIME]
                total += TICK_S * sum(map(int, times)) + of_descendants(child)
    return total


def of_this_process() -> float:
    """Returns the seconds that this process, its reaped children and its living descendants have computed."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + reaped.ru_utime + reaped.ru_stime + of_descendants(os.getpid())


@dataclass(frozen=True)
class Phase:
    """Set-up, call or tear-down of one test."""

    nodeid: str
    seconds: float

    @property
    def function(self) -> str:
        return self.nodeid.partition("[")[0]

    @property
    def folder(self) -> str:
        folders = self.nodeid.partition("::")[0].split("/")[:-1]
        return "/".join(folders[: 4 if folders[1:2] == ["services"] else 2])


def table(tests: list[Phase], total: float) -> list[str]:
    """Returns the lines of the report. `total`: seconds of all processes, which contains imports and collection."""
    functions, folders, cases = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, set[str]](set),
    )
    for test in tests:
        functions[test.function] += test.seconds
        folders[test.folder] += test.seconds
        cases[test.function].add(test.nodeid)
    in_tests = sum(folders.values())
    return [
        f"{total:.0f} s, of which {in_tests:.0f} s in tests and {total - in_tests:.0f} s in imports and collection",
        *(f"{seconds:8.1f}  {name}" for name, seconds in most(folders)),
        f"the {MOST_EXPENSIVE} most expensive tests (seconds, cases, seconds of a case):",
        *(
            f"{seconds:8.1f} {len(cases[name]):6} {seconds / len(cases[name]):8.3f}  {name}"
            for name, seconds in most(functions)[:MOST_EXPENSIVE]
        ),
    ]


def most(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


class ProcessorTime:
    """Measures each phase of each test in the process that runs it, and reports all of them at the end."""

    def __init__(self, now: Callable[[], float] = of_this_process) -> None:
        self._now = now
        self._last = now()
        self._tests: list[Phase] = []
        self._of_workers = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = self._now()
        report.processor_s, self._last = now - self._last, now
        return report

    def pytest_collection_finish(self) -> None:
        self._last = self._now()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests.append(Phase(report.nodeid, report.processor_s))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["processor_s"] = self._now()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get("processor_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("processor time")
        for line in table(self._tests, self._of_workers or self._now()):
            terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())
