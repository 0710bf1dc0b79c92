"""Constraints are compiled when they come: what no worker could use is refused before anything is tokenized.

The compiling happens in child processes (grammar_probe.py) with little memory and little time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.services.frontend.bounds.turns import SmallestFirst
from quire.services.frontend.input_processor.grammars import grammar_probe
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import Child, ChildEnded
from quire.shared.structured_output.checks import FIELD
from quire.shared.structured_output.literals import Specials

QUICK_S = 0.5  # of a child's processor time: the largest constraints that people write take 0.3
PATIENCE_S = 3.0  # of those that take longer, one at a time
REMEMBERED = 4096  # constraints that were found good or bad
NUM_PROBES = 2  # for those that are quick


class GrammarValidator:
    """Remembers its verdicts: clients send the same form again and again.

    Whoever has sent dozens that take long waits for them, and not the others: those have a lane of their own, and in
    both lanes the last to come is tried first."""

    def __init__(self, specials: Specials, vocab_size: int) -> None:
        """`specials`: tokens that a grammar may name."""
        introduction = grammar_probe.introduction(specials, vocab_size)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._quick = Lane("grammar-validator", [Probe(introduction) for _ in range(NUM_PROBES)])
        self._slow = Lane("grammar-validator-slow", [Probe(introduction)])

    async def check(self, constraint: sampling_pb2.StructuredOutput, libraries: Sequence[str] = ()) -> None:
        """`libraries`: that workers offer it to, in order; empty: llguidance. Raises InvalidArgument."""
        structured_output.check_size(constraint)  # the rest takes milliseconds and happens in the child
        message = grammar_probe.question(constraint, libraries)
        key = hashlib.sha256(message).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judge(message)
            self._verdicts[key] = verdict
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    async def _judge(self, message: bytes) -> str:
        for lane, patience_s in ((self._quick, QUICK_S), (self._slow, PATIENCE_S)):
            with contextlib.suppress(TookLong):
                return await lane.ask(message, patience_s)
        return _refusal(f"{PATIENCE_S:.0f} s")

    @property
    def pids(self) -> list[int]:
        """Of the child processes that there are."""
        return [pid for lane in (self._quick, self._slow) for probe in lane.probes if (pid := probe.pid)]

    def close(self) -> None:
        """Ends the child processes."""
        self._quick.close()
        self._slow.close()


class TookLong(Exception):
    """More than the patience."""


class Lane:
    """Some probes, and those who wait for them, the last to come first."""

    def __init__(self, name: str, probes: list[Probe]) -> None:
        self.probes = probes
        self._free = probes.copy()  # the one that was used last is warm
        self._threads = ThreadPoolExecutor(len(probes), name)
        self._turns = SmallestFirst(len(probes))
        self._numbers = itertools.count(0, -1)

    async def ask(self, message: bytes, patience_s: float) -> str:
        """The verdict; TookLong."""
        async with self._turns.turn(next(self._numbers)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message, patience_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for probe in self._free:
            probe.close()

    def _ask(self, message: bytes, patience_s: float) -> str:
        probe = self._free.pop()
        try:
            return probe.verdict(message, patience_s)
        finally:
            self._free.append(probe)


def _refusal(bound: str) -> str:
    return structured_output.refuse(f"it takes more than {bound} to compile").message


class Probe:
    """A child process that compiles."""

    def __init__(self, introduction: bytes) -> None:
        self._child = Child(grammar_probe.__name__, introduction)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def verdict(self, message: bytes, patience_s: float) -> str:
        """Empty if nothing is wrong; TookLong."""
        try:
            return self._child.ask(grammar_probe.order(message, patience_s)).decode()
        except ChildEnded as ended:
            if ended.status in (None, -grammar_probe.OUT_OF_TIME):
                raise TookLong from None
            return _refusal(f"{grammar_probe.MEMORY_BYTES >> 20} MiB")

    def close(self) -> None:
        self._child.close()
