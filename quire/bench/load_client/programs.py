"""Other engines, run as a helper program in their own environment: a load in as one line, its result out."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from types import TracebackType
from typing import Any

from quire.bench.load_client.arrivals import ArrivalPattern
from quire.bench.load_client.clients import Progress
from quire.bench.load_client.timing import LoadResult, RequestTiming
from quire.bench.workload.workloads import Workload
from quire.shared.errors import Unavailable

END_TIMEOUT_S = 30.0


class Program:
    """A running helper program; `peers/vllm_generate.py` documents the lines. All requests of a load start at once
    and end together."""

    def __init__(self, command: str) -> None:
        """Starts the program and waits for its first line; raises Unavailable if it ends before."""
        self._command = command
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._forget = False
        try:
            self._answer()
        except Unavailable:
            self.close()
            raise

    def forget(self) -> None:
        """Resets the prefix cache before the next load."""
        self._forget = True

    def run(self, work: Workload, arrivals: ArrivalPattern, progress: Progress | None = None) -> LoadResult:
        """Sends a workload to the program as one JSON line and returns its result. Only total time and token counts
        are known; `arrivals` and `progress` are not used."""
        load = {
            "prompts": [item.prompt for item in work.items],
            "num_output": [item.num_output for item in work.items],
            "temperature": work.temperature,
            "forget": self._forget,
        }
        self._forget = False
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        answer = self._answer()
        end = time.monotonic()
        begin = end - answer["seconds"]
        timings = [RequestTiming(begin, num_tokens=count, ended=end) for count in answer["num_output"]]
        return LoadResult(begin, work.num_prompt_tokens, timings, [0.0])

    def close(self) -> None:
        """Closes the program's input, which ends it, and kills it if it is still running after END_TIMEOUT_S."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _answer(self) -> Any:
        """Reads one line of JSON from the program; raises Unavailable if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(
                f"beside: the program {self._command!r} ended with status {self._process.wait()} before it answered"
            )
        return json.loads(line)
