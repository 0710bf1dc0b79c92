"""Validation of constraints on arrival: those that no worker can compile are refused before tokenization.

The compilation runs in child processes (grammar_process.py) with limits of memory and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.input_processor.grammars import grammar_process
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import Child, ChildEnded
from quire.shared.structured_output.checks import FIELD
from quire.shared.structured_output.literals import SpecialTokens

FAST_LANE_CPU_S = 0.5  # processor time of a child: the largest constraints that people write take 0.3 s
SLOW_LANE_CPU_S = 3.0  # for those that take longer, one at a time
MAX_CACHED_VERDICTS = 4096  # results of recent constraints
NUM_FAST_COMPILERS = 2  # for constraints that compile fast


class GrammarValidator:
    """Validator of constraints with a cache of results, since clients send the same constraint repeatedly.

    Slow constraints have a separate lane, so that they delay only each other; in both lanes the last to arrive is
    compiled first.
    """

    def __init__(
        self,
        specials: SpecialTokens,
        vocab_size: int,
        *,
        slow_lane_cpu_s: float = SLOW_LANE_CPU_S,
        compiler: Callable[[bytes], GrammarCompiler] | None = None,
    ) -> None:
        """Creates the compilers, whose processes start on first use.

        `specials`: tokens that a grammar may name; `compiler`: creates a compiler from its first message.
        """
        self._slow_lane_cpu_s = slow_lane_cpu_s
        new_compiler = compiler or GrammarCompiler
        init_message = grammar_process.encode_vocabulary(specials, vocab_size)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._fast = CompilerLane("grammar-validator", [new_compiler(init_message) for _ in range(NUM_FAST_COMPILERS)])
        self._slow = CompilerLane("grammar-validator-slow", [new_compiler(init_message)])

    async def check(self, constraint: sampling_pb2.StructuredOutput, libraries: Sequence[str] = ()) -> None:
        """Raises InvalidArgument for a constraint that no worker could compile. `libraries` are those that workers
        try, in order; none means llguidance. Verdicts are cached, the last MAX_CACHED_VERDICTS of them."""
        structured_output.check_size(constraint)  # the rest takes milliseconds and happens in the child
        message = grammar_process.encode_constraint(constraint, libraries)
        key = hashlib.sha256(message).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._verdict(message)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict:
            raise InvalidArgument(verdict, field=FIELD)

    async def _verdict(self, message: bytes) -> str:
        """Returns the compilers' verdict: first from the fast lane, after a timeout there from the slow lane, and
        after a second timeout a refusal that names the limit."""
        for lane, cpu_limit_s in ((self._fast, FAST_LANE_CPU_S), (self._slow, self._slow_lane_cpu_s)):
            with contextlib.suppress(CompileTimeout):
                return await lane.ask(message, cpu_limit_s)
        return _refusal(f"{self._slow_lane_cpu_s:.0f} s")

    @property
    def pids(self) -> list[int]:
        """Ids of the running child processes."""
        return [pid for lane in (self._fast, self._slow) for compiler in lane.compilers if (pid := compiler.pid)]

    def close(self) -> None:
        """Ends the child processes."""
        self._fast.close()
        self._slow.close()


class CompileTimeout(Exception):
    """Signal that a compilation exceeded its limit of processor time."""


class CompilerLane:
    """Compilers of one lane and the queue before them, in which the last to arrive comes first."""

    def __init__(self, name: str, compilers: list[GrammarCompiler]) -> None:
        self.compilers = compilers
        self._free = compilers.copy()  # the one used last is warm
        self._threads = ThreadPoolExecutor(len(compilers), name)
        self._turns = SmallestFirstLimiter(len(compilers))
        self._numbers = itertools.count(0, -1)

    async def ask(self, message: bytes, cpu_limit_s: float) -> str:
        """Waits for a free compiler process and returns its error for a constraint, empty if it is valid. Raises
        CompileTimeout after `cpu_limit_s` seconds of processor time."""
        async with self._turns.slot(next(self._numbers)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message, cpu_limit_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for compiler in self._free:
            compiler.close()

    def _ask(self, message: bytes, cpu_limit_s: float) -> str:
        """Blocks on a free compiler process, which it borrows for the call; raises CompileTimeout after
        `cpu_limit_s`."""
        compiler = self._free.pop()
        try:
            return compiler.verdict(message, cpu_limit_s)
        finally:
            self._free.append(compiler)


def _refusal(bound: str) -> str:
    return structured_output.refuse(f"it takes more than {bound} to compile").message


class GrammarCompiler:
    """Child process that compiles constraints."""

    def __init__(self, init_message: bytes) -> None:
        self._child = Child(grammar_process.__name__, init_message)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def verdict(self, message: bytes, cpu_limit_s: float) -> str:
        """Returns the error of a constraint, empty if it is valid; a process that exceeds its memory is an error as
        well. Raises CompileTimeout after `cpu_limit_s` seconds of processor time; blocks."""
        try:
            return self._child.ask(grammar_process.with_cpu_limit(message, cpu_limit_s)).decode()
        except ChildEnded as ended:
            if ended.status in (None, -grammar_process.TIMEOUT_SIGNAL):
                raise CompileTimeout from None
            return _refusal(f"{grammar_process.MEMORY_BYTES >> 20} MiB")

    def close(self) -> None:
        self._child.close()
