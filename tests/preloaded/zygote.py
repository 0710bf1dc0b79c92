"""python -m tests.preloaded.zygote FD quire ROLE: becomes, in a fork of its own, each command that it is sent."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from multiprocessing import forkserver, util
from os import _exit
from typing import Any

from quire import interrupts

CHILD, COMMAND = "child", "command"  # children of services, and `quire ...`
SHARED = "ZYGOTES"  # environment variable of a command's zygote: sockets of those of services
MODULES: dict[str, tuple[str, ...]] = {
    COMMAND: (
        "quire.cli.up",
        "quire.cli.status",
        "quire.cli.doctor",
        "quire.cli.chat",
        "quire.cli.complete",
        "quire.cli.top",
        "quire.cli.size",
        "quire.doctor.model",
        "quire.services.frontend.main",
        "tests.preloaded.process",
    ),
    CHILD: (
        "quire.services.frontend.tokenizer.chat_rendering.rendering_process",
        "quire.services.frontend.input_processor.grammars.grammar_process",
        "quire.services.frontend.bounds.bodies.body_probe",
    ),
    "frontend": ("quire.services.frontend.main",),
    "scheduler": ("quire.services.scheduler.main",),
    "worker": ("quire.services.worker.main", "quire.services.worker.service"),
}
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")
NUM_FILES = 4  # standard input, output, errors, and where the exit status goes


class Zygote:
    """Single-threaded process, so that a fork is complete."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._told: dict[int, int] = {}  # by process: where its exit status goes
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[str]:
        """Forks on request; returns, in each child, the command to run; ends when no process can send requests any
        more."""
        while True:
            readable = select.select([self._asking.fileno(), self._woken], [], [])[0]
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._bury()
            if self._asking.fileno() in readable:
                header, files, _, _ = socket.recv_fds(self._asking, LENGTH.size, NUM_FILES)
                if not header:
                    _exit(0)
                asked = json.loads(self._received(LENGTH.unpack(header)[0]))
                pid = os.fork()
                if pid == 0:
                    self._become(asked, files)
                    return list(asked["command"])
                self._told[pid] = files.pop()
                for file in files:
                    os.close(file)
                self._asking.sendall(STATUS.pack(pid))

    def _received(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            if not (part := self._asking.recv(size - len(parts))):
                _exit(0)  # who asked is gone
            parts += part
        return parts

    def _bury(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            told = self._told.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # who asked is gone
                os.write(told, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(told)

    def _become(self, asked: dict[str, Any], files: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self._asking.close()
        os.close(self._woken)
        for told in self._told.values():
            os.close(told)
        for number, file in enumerate(files):
            if number < NUM_FILES - 1:
                os.dup2(file, number)
            os.close(file)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for module in asked["custom"]:
            runpy.run_path(module)
        if any("-parallel-size" in word for word in asked["command"]):
            begin_fork_server()


def begin_fork_server() -> None:
    """Makes the fork server of this process's ranks a fork of it, while it has one thread, instead of a new
    interpreter that imports everything."""
    from quire.services.worker.ranks import processes

    start_interpreter = util.spawnv_passfds

    def fork(path: str, args: list[str], kept: list[int]) -> int:
        if "forkserver" not in args[-1]:  # it is for the resource tracker
            return start_interpreter(path, args, kept)
        pid = os.fork()
        if pid == 0:
            interrupts.IS_COMMAND = False
            for number in map(int, os.listdir("/proc/self/fd")):
                if number >= NUM_FILES - 1 and number not in kept:
                    with contextlib.suppress(OSError):  # it was for listing them
                        os.close(number)
            try:
                exec(args[-1], {})
            finally:
                _exit(0)
        return pid

    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = start_interpreter
    processes.START_CONTEXT = multiprocessing.get_context("forkserver")


def share_zygotes(environment: Mapping[str, str], sockets: Mapping[str, int], lock: str) -> None:
    """Makes this process's clusters fork their services from the zygotes of the test run."""
    from quire.cluster import process
    from tests.preloaded.process import Zygotes

    asking = {role: socket.socket(fileno=number) for role, number in sockets.items()}
    process.launch = Zygotes(environment, asking, lock).start


def main() -> None:
    asking = socket.socket(fileno=int(sys.argv[1]))
    of_commands = () if sys.argv[3] == CHILD else ("quire.cli.main", "quire.cli.services")
    for name in (*of_commands, *MODULES[sys.argv[3]]):
        importlib.import_module(name)
    gc.freeze()
    interrupts.IS_COMMAND = sys.argv[3] != CHILD  # what each of them will be
    shared = json.loads(os.environ.pop(SHARED, "null"))
    environment = dict(os.environ)
    sys.argv = Zygote(asking).serve()[3:]
    if shared:
        share_zygotes(environment, shared["sockets"], shared["lock"])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
