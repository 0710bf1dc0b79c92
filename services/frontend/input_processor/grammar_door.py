"""Constraints are compiled at the door: what no worker could use is refused before anything is tokenized.

The compiling happens in child processes (grammar_probe.py) with little memory and little time.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue

from services.frontend.input_processor import grammar_probe
from shared import structured_output
from shared.errors import Internal, InvalidArgument
from shared.pb.common.v1 import sampling_pb2
from shared.priority import step_back
from shared.structured_output.checks import FIELD
from shared.structured_output.literals import Specials

PATIENCE_S = 3.0  # of a child's processor time: the largest constraints that people write take a tenth of it
LONGEST_WAIT_S = 60.0  # for that, and for a child's imports, on a machine that has much to do
REMEMBERED = 4096  # constraints that were found good or bad
NUM_PROBES = 2


class GrammarDoor:
    """Remembers its verdicts: clients send the same form again and again."""

    def __init__(self, specials: Specials, vocab_size: int) -> None:
        """`specials`: tokens that a grammar may name."""
        introduction = grammar_probe.introduction(specials, vocab_size)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_PROBES, "grammar-door", step_back)  # and so the processes they start
        self._probes: LifoQueue[Probe] = LifoQueue()  # the one that was used last is warm
        for _ in range(NUM_PROBES):
            self._probes.put(Probe(introduction))

    async def check(self, constraint: sampling_pb2.StructuredOutput) -> None:
        """Raises InvalidArgument."""
        structured_output.check_size(constraint)  # the rest takes milliseconds and happens in the child
        message = constraint.SerializeToString(deterministic=True)
        key = hashlib.sha256(message).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message)
            self._verdicts[key] = verdict
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    def close(self) -> None:
        """Ends the child processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._probes.empty():
            self._probes.get().close()

    def _ask(self, message: bytes) -> str:
        probe = self._probes.get()
        try:
            return probe.verdict(message)
        finally:
            self._probes.put(probe)


class Probe:
    """A child process, started when it is first asked and after each time that it had to be ended."""

    def __init__(self, introduction: bytes) -> None:
        self._introduction = introduction
        self._child: subprocess.Popen[bytes] | None = None

    def verdict(self, message: bytes) -> str:
        """Empty if nothing is wrong."""
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            grammar_probe.write(child.stdin, message)
        except BrokenPipeError:  # it has been killed from outside while nobody asked
            self.close()
            return self.verdict(message)
        ready, _, _ = select.select([child.stdout], [], [], LONGEST_WAIT_S)
        answer = grammar_probe.read(child.stdout) if ready else None
        if answer is not None:
            return answer.decode()
        took_long = not ready or child.wait() == -grammar_probe.OUT_OF_TIME
        self.close()
        bound = f"{PATIENCE_S:.0f} s" if took_long else f"{grammar_probe.MEMORY_BYTES >> 20} MiB"
        return structured_output.refuse(f"it takes more than {bound} to compile").message

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", grammar_probe.__name__, str(PATIENCE_S)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.stdin is not None
        assert child.stdout is not None
        self._child = child
        grammar_probe.write(child.stdin, self._introduction)
        ready, _, _ = select.select([child.stdout], [], [], LONGEST_WAIT_S)
        if not ready or grammar_probe.read(child.stdout) is None:
            self.close()
            raise Internal("the process that compiles constraints at the door does not start")
        return child
