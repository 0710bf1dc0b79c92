"""`quire top`: what it draws, and that it draws it on a terminal of a running cluster."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

import pytest

from quire import SamplingParams
from quire.client import Client
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.top.history import BARS, History
from quire.top.view import Palette, lines
from tests.e2e.conftest import running_cluster
from tests.preloaded import command

COLOURS = re.compile(r"\033\[[0-9;?]*[a-zA-Z]")


def worker(used: int, cached: int, generated: int = 0) -> pb.ServiceStatus:
    return pb.ServiceStatus(
        role=pb.ROLE_WORKER,
        id="worker-0",
        epoch=7,
        state=pb.STATE_READY,
        blocks=pb.BlockCounts(total=100, used=used, cached=cached, free=100 - used - cached),
        work=pb.WorkCounts(generated_tokens=generated, tokens_per_s=120),
    )


def drawn(*services: pb.ServiceStatus, width: int = 100) -> list[str]:
    return lines(services, History(), width, Palette(coloured=False))


def test_blocks_are_a_bar_of_used_cached_and_free() -> None:
    (row,) = (line for line in drawn(worker(50, 25)) if line.startswith("worker-0"))
    used, cached, free = (row.count(mark) for mark in "█▒·")
    assert abs(used - 2 * cached) <= 1
    assert abs(cached - free) <= 1
    (row,) = (line for line in drawn(worker(1, 0)) if line.startswith("worker-0"))
    assert row.count("█") == 1, "one block of many is seen, too"


def test_rates_are_of_what_was_generated_between_two_looks() -> None:
    history = History()
    for second, generated in enumerate((0, 100, 300, 300)):
        history.add([worker(0, 0, generated)], float(second))
    assert list(history.rates) == [100, 200, 0]
    assert history.curve(10) == BARS[4] + BARS[-1] + BARS[0]
    lost = worker(0, 0, 5)
    lost.epoch = 8
    history.add([lost], 4.0)
    assert history.rates[-1] == 0, "another attachment counts from the start"


def test_no_line_is_wider_than_the_terminal_and_ids_cannot_steer_it() -> None:
    calls = [pb.CallStatus(request_id="\033[2J" + "x" * 300, tenant="acme", age_s=70.0, completion_tokens=7)]
    frontend = pb.ServiceStatus(role=pb.ROLE_FRONTEND, id="frontend-0", state=pb.STATE_READY, oldest_calls=calls)
    shown = drawn(frontend, worker(10, 10), width=100)
    assert max(map(len, shown)) <= 100
    assert not any("\033" in line for line in shown)
    assert any("acme" in line and "70.0 s" in line for line in shown)


def test_once_is_for_scripts() -> None:
    with running_cluster(worker={"num_blocks": 300}) as cluster, Client(cluster.grpc_address) as client:
        client.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))
        done = command.run("top", "--once", "--address", cluster.grpc_address)
    assert "\033" not in done.stdout
    assert "worker-0  ready" in done.stdout
    assert "no request is being answered" in done.stdout


@pytest.mark.parametrize("ending", ["q", "SIGTERM"])
def test_a_terminal_shows_requests_as_they_run_and_is_left_as_it_was(ending: str) -> None:
    with running_cluster(worker={"num_blocks": 3000}) as cluster:
        there = ("--address", cluster.grpc_address)
        main, other = pty.openpty()
        before = termios.tcgetattr(other)
        with (
            command.started("complete", "Once", "--max-tokens", "900", *there, stdout=subprocess.PIPE),
            command.started("top", "--interval-s", "0.1", *there, stdin=other, stdout=other, stderr=other) as top,
        ):
            seen = read_until(main, "tokens/s", "worker-0")
            if ending == "q":
                os.write(main, b"xq")
            else:
                top.send_signal(signal.SIGTERM)  # SIGINT may be ignored in the test run's environment
            seen += read_until(main, "\033[?1049l")
            assert top.wait(30) == 0
            assert termios.tcgetattr(other) == before
        os.close(main)
        os.close(other)
    assert seen.startswith("\033[?1049h")


def read_until(terminal: int, *words: str) -> str:
    """All that was written until each of the words was."""
    seen, deadline = "", time.monotonic() + 60
    while not all(word in seen for word in words):
        assert time.monotonic() < deadline, COLOURS.sub("", seen)
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen
