"""Constraints are compiled when they come: what no worker could use is refused before anything is tokenized.

The compiling happens in child processes (grammar_process.py) with little memory and little time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.input_processor.grammars import grammar_process
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import Child, ChildEnded
from quire.shared.structured_output.checks import FIELD
from quire.shared.structured_output.literals import SpecialTokens

FAST_LANE_CPU_S = 0.5  # of a child's processor time: the largest constraints that people write take 0.3
SLOW_LANE_CPU_S = 3.0  # of those that take longer, one at a time
MAX_CACHED_VERDICTS = 4096  # constraints that were found good or bad
NUM_FAST_COMPILERS = 2  # for those that are quick


class GrammarValidator:
    """Remembers its verdicts: clients send the same form again and again.

    Whoever has sent dozens that take long waits for them, and not the others: those have a lane of their own, and in
    both lanes the last to come is tried first."""

    def __init__(self, specials: SpecialTokens, vocab_size: int) -> None:
        """`specials`: tokens that a grammar may name."""
        introduction = grammar_process.encode_vocabulary(specials, vocab_size)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._quick = CompilerLane(
            "grammar-validator", [GrammarCompiler(introduction) for _ in range(NUM_FAST_COMPILERS)]
        )
        self._slow = CompilerLane("grammar-validator-slow", [GrammarCompiler(introduction)])

    async def check(self, constraint: sampling_pb2.StructuredOutput, libraries: Sequence[str] = ()) -> None:
        """`libraries`: that workers offer it to, in order; empty: llguidance. Raises InvalidArgument."""
        structured_output.check_size(constraint)  # the rest takes milliseconds and happens in the child
        message = grammar_process.encode_constraint(constraint, libraries)
        key = hashlib.sha256(message).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judge(message)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    async def _judge(self, message: bytes) -> str:
        for lane, cpu_limit_s in ((self._quick, FAST_LANE_CPU_S), (self._slow, SLOW_LANE_CPU_S)):
            with contextlib.suppress(CompileTimeout):
                return await lane.ask(message, cpu_limit_s)
        return _refusal(f"{SLOW_LANE_CPU_S:.0f} s")

    @property
    def pids(self) -> list[int]:
        """Of the child processes that there are."""
        return [pid for lane in (self._quick, self._slow) for compiler in lane.compilers if (pid := compiler.pid)]

    def close(self) -> None:
        """Ends the child processes."""
        self._quick.close()
        self._slow.close()


class CompileTimeout(Exception):
    """More than the patience."""


class CompilerLane:
    """Some compilers, and those who wait for them, the last to come first."""

    def __init__(self, name: str, compilers: list[GrammarCompiler]) -> None:
        self.compilers = compilers
        self._free = compilers.copy()  # the one that was used last is warm
        self._threads = ThreadPoolExecutor(len(compilers), name)
        self._turns = SmallestFirstLimiter(len(compilers))
        self._numbers = itertools.count(0, -1)

    async def ask(self, message: bytes, cpu_limit_s: float) -> str:
        """The verdict; CompileTimeout."""
        async with self._turns.slot(next(self._numbers)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message, cpu_limit_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for compiler in self._free:
            compiler.close()

    def _ask(self, message: bytes, cpu_limit_s: float) -> str:
        compiler = self._free.pop()
        try:
            return compiler.verdict(message, cpu_limit_s)
        finally:
            self._free.append(compiler)


def _refusal(bound: str) -> str:
    return structured_output.refuse(f"it takes more than {bound} to compile").message


class GrammarCompiler:
    """A child process that compiles."""

    def __init__(self, introduction: bytes) -> None:
        self._child = Child(grammar_process.__name__, introduction)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def verdict(self, message: bytes, cpu_limit_s: float) -> str:
        """Empty if nothing is wrong; CompileTimeout."""
        try:
            return self._child.ask(grammar_process.with_cpu_limit(message, cpu_limit_s)).decode()
        except ChildEnded as ended:
            if ended.status in (None, -grammar_process.TIMEOUT_SIGNAL):
                raise CompileTimeout from None
            return _refusal(f"{grammar_process.MEMORY_BYTES >> 20} MiB")

    def close(self) -> None:
        self._child.close()
