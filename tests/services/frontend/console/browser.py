"""Controls a headless Chromium through pipes, with DevTools protocol messages ended by a zero byte."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--mute-audio",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",  # which pages may use
)

# Chromium reads commands from descriptor 3 and answers on 4.
AS_DESCRIPTORS = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page; records logged errors and all requested addresses."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.errors: list[str] = []
        self.addresses: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Network", "Page", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until the expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.errors)
            time.sleep(0.05)
        return value

    def open(self, address: str, *, width: int = 1280, height: int = 800) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def choose_files(self, selector: str, *files: Path) -> None:
        """Sets the files of a file input, as its dialog does."""
        document = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], PATIENCE_S)[0], "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has closed the connection"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.addresses.append(values["request"]["url"])


@contextmanager
def browsing() -> Iterator[Browser]:
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        start = [sys.executable, "-c", AS_DESCRIPTORS, str(theirs_in), str(theirs_out)]
        command = [*start, CHROMIUM, "--remote-debugging-pipe", f"--user-data-dir={profile}", *FLAGS]
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.kill()
            process.wait()
            os.close(ours_out)
            os.close(ours_in)
