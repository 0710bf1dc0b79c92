"""Processes of tests are forks of processes that have imported their modules already; otherwise a run takes twice as
long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

from quire.cluster import process
from quire.services.frontend.bounds.bodies import body_probe
from quire.services.worker.ranks import processes
from quire.shared.process import child
from quire.shared.process.child import Child
from quire.shared.settings.request_limits import RequestLimits
from quire.shared.version import version_text
from tests.preloaded import command
from tests.preloaded.process import Zygotes
from tests.waiting import has_ended, until


def test_ranks_are_forks() -> None:
    assert processes.START_CONTEXT.get_start_method() == "forkserver"


def test_services_of_a_cluster_and_their_children_are_forks() -> None:
    assert getattr(process.launch, "__func__", None) is Zygotes.start
    assert getattr(child.launch, "__func__", None) is Zygotes.start_child


def test_a_child_that_is_killed_is_noticed_and_started_again() -> None:
    limits = json.dumps(asdict(RequestLimits())).encode()
    probe = Child(body_probe.__name__, limits)
    probe.start()
    first = probe.pid
    assert first is not None
    assert Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")[2] == b"tests.preloaded.zygote"
    os.kill(first, signal.SIGKILL)
    until(lambda: has_ended(first))
    probe.close()
    probe.start()
    assert probe.pid != first
    probe.close()


def test_a_command_writes_to_its_own_output_and_returns_its_status() -> None:
    done = command.run("version")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, version_text().split(), "")
    wrong = command.run("nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "nonsense" in wrong.stderr


def test_a_command_reads_its_own_environment_and_input() -> None:
    done = command.run("complete", "-", "--address", "127.0.0.1:1", stdin="")
    assert done.returncode == 1
    assert done.stderr.startswith("quire: ")


def test_services_of_a_command_are_forks_as_well() -> None:
    up = ("up", "--workers", "0", "--http-port", "0", "--grpc-port", "0", "--redis", "none")
    with command.started(*up, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("quire ready")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert not children, "a fork is a child of its zygote"
