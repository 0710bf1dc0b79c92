"""Every task and thread has an owner that handles its end."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("services", "shared")
OWNERS = {"shared/process/supervision.py", "shared/process/lifecycle.py"}
GROUPS = {
    "services/frontend/kserve_edge/service.py",
    "services/frontend/media/pipeline.py",
    "services/frontend/offline/runner.py",
}  # tasks of an asyncio.TaskGroup, which sees their ends
THREADS = {  # each with what sees its end
    "services/worker/engine/device_thread.py": "the engine, by its `died`",
    "services/worker/models/loading/broadcast/gloo_receiver.py": "no one: it waits for who asks, and ends the process",
    "services/worker/engine/waiter.py": "the engine, by its `died`",
    "services/worker/ranks/follower.py": "rank 0, which hears no sign of life; the other one ends the process",
    "services/worker/ranks/hosts/node.py": "rank 0, which hears no answer or no sign of life; no one of that "
    "which waits for the order to stop and ends ranks",
    "services/worker/ranks/hosts/nodes.py": "looks at the ranks of that host: no heartbeat comes; and the host itself",
    "services/worker/kv/page_prefaulter.py": "no one: what it has not touched, the step that writes it does",
    "services/worker/offload/disk_store.py": "whoever waits for a move, which is answered in time without them",
    "services/worker/warmup/early_init.py": "no one: it fills a cache that the first step fills otherwise",
    "services/worker/host/background.py": "the future of each job",
    "services/worker/structured/mask_builder.py": "a watch that reads one attribute and sets another",
    "shared/logs.py": "the count of lines that were left out",
    "shared/metrics/base.py": "the scrape, which fails",
    "shared/process/child.py": "nobody: it waits for the end of a process, whose owner is told when it asks it",
    "shared/process/watchdog.py": "nobody: it reads one number and ends the process",
}


TASKS = ("create_task", "ensure_future", "run_coroutine_threadsafe")
STARTERS = (*TASKS, "Thread")


@functools.cache
def calls() -> list[tuple[str, str]]:
    """Returns (file, called name) in all files of the services that call one of STARTERS."""
    found = []
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if any(name in text for name in STARTERS) else ():
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    found.append((path.relative_to(ROOT).as_posix(), name))
    return found


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_started_by_those_who_look_at_their_end(name: str) -> None:
    starters = {file for file, called in calls() if called == name}
    assert starters <= OWNERS | GROUPS, f"use quire.shared.process.supervision.Tasks instead of {name}"


def test_tasks_of_a_group_are_all_that_is_started_there() -> None:
    for file in GROUPS:
        text = (ROOT / file).read_text()
        assert text.count("create_task(") == text.count("group.create_task(") > 0
        assert "asyncio.TaskGroup() as group" in text


def test_threads_have_an_owner() -> None:
    assert {file for file, called in calls() if called == "Thread"} == set(THREADS)
