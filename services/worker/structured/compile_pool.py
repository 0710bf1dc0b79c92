"""Grammars by name: compiled in threads of their own, once each, kept while the scheduler needs them and longer."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.services.worker.host.background import BackgroundThreads
from quire.services.worker.structured.port import Grammar, GrammarBackend
from quire.shared.errors import Internal, InvalidArgument, QuireError
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import LONGEST_START_S
from quire.shared.process.priority import lower_priority
from quire.shared.structured_output.checks import FIELD

log = logger("worker.grammars")

NUM_THREADS = min(4, max(1, (os.cpu_count() or 1) // 2))
MAX_CPU_S = 10.0  # of the thread's processor time, with a grammar that frontends, with less patience, have let in
MAX_WALL_S = 60.0  # by the clock: a library's own process is bounded in its processor time, on a machine that is busy
# Grammars that stay though no sequence needs them: a compiled one takes up to a thousand times its text.
MAX_UNUSED = 256
MAX_UNUSED_BYTES = 1 << 20  # of text
BYTES_OF_TEXT = 1000  # that count as one of text, of a library that knows what its grammars take


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """How much may be compiled at a time, and how long one grammar may take."""

    num_threads: int = NUM_THREADS
    max_cpu_s: float = MAX_CPU_S
    max_wall_s: float = MAX_WALL_S
    max_unused: int = MAX_UNUSED


LIMITS = CompileLimits()


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What came of an order."""

    error: QuireError | None
    compile_us: int  # 0: it was there


OnCompiled = Callable[[CompileResult], None]


class MaskObserver(Protocol):
    """Is told how long masks take, from any thread."""

    def observe_mask_fill(self, seconds: float) -> None:
        """Those of all sequences of a step, beside the device's work."""

    def observe_mask_wait(self, seconds: float) -> None:
        """A step's sampling had to wait for them."""


class NoMaskObserver:
    """Where there are no metrics."""

    def observe_mask_fill(self, seconds: float) -> None:
        """Not measured."""

    def observe_mask_wait(self, seconds: float) -> None:
        """Not measured."""


@dataclass(slots=True)
class _Compilation:
    """A grammar that is being compiled."""

    waiting: list[OnCompiled] = field(default_factory=list)
    num_uses: int = 0
    is_finished: bool = False
    watch: threading.Timer | None = None


@dataclass(frozen=True, slots=True)
class _CompileDeadline:
    """The time that a thread may take: its own, and the clock's."""

    clock: int
    thread_time_s: float
    monotonic_s: float

    @property
    def left_s(self) -> float:
        """The least time in which one of both may be used up."""
        return min(self.thread_time_s - time.clock_gettime(self.clock), self.monotonic_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class _CompiledEntry:
    grammar: Grammar
    num_bytes: int  # of its text, or of what stands for it


class CompilePool:
    """`prepare` and `release` count: what is prepared twice stays until it is released twice. Any thread may call."""

    def __init__(
        self,
        open_backend: Callable[[], GrammarBackend],
        observer: MaskObserver | None = None,
        bounds: CompileLimits = LIMITS,
    ) -> None:
        """`open_backend` reads the vocabulary; called once, when the first grammar is wanted. `observer`: of the masks
        that are made with the grammars."""
        self.observer: MaskObserver = observer or NoMaskObserver()
        self._open_backend, self._bounds = open_backend, bounds
        self._opening = threading.Lock()
        self._opened: GrammarBackend | None = None
        self._lock = threading.Lock()
        self._threads: BackgroundThreads | None = None
        self._compiled: OrderedDict[bytes, _CompiledEntry] = OrderedDict()  # least recently wanted first
        self._compilations: dict[bytes, _Compilation] = {}
        self._use_counts: Counter[bytes] = Counter()

    def prepare(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, done: OnCompiled) -> None:
        """`done` is called once, from any thread."""
        with self._lock:
            if grammar_id not in self._compiled:
                compilation = self._compilations.get(grammar_id) or self._start_compilation(grammar_id, constraint)
                compilation.waiting.append(done)
                compilation.num_uses += 1
                return
            self._compiled.move_to_end(grammar_id)
            self._use_counts[grammar_id] += 1
        done(CompileResult(None, 0))

    def release(self, grammar_id: bytes) -> None:
        with self._lock:
            self._use_counts[grammar_id] -= 1
            if self._use_counts[grammar_id] <= 0:
                del self._use_counts[grammar_id]
                self._evict()

    def release_all(self) -> None:
        """All grammars may go."""
        with self._lock:
            self._use_counts.clear()
            for compilation in self._compilations.values():
                compilation.num_uses = 0
            self._evict()

    def grammar(self, grammar_id: bytes) -> Grammar | None:
        """None if it has not been prepared, or has been released."""
        with self._lock:
            ready = self._compiled.get(grammar_id)
            return None if ready is None else ready.grammar

    def open_backend_early(self) -> None:
        """Opens the backend beside what the caller does next: reading the vocabulary holds Python's lock, and with the
        first grammar it would hold up every stream. What is wrong with it is said where a grammar is wanted."""
        with self._lock:
            self._in_background(lambda: self.backend)

    @property
    def backend(self) -> GrammarBackend:
        """Raises QuireError if there can be none."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open_backend()
            return self._opened

    def _start_compilation(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput) -> _Compilation:
        compilation = self._compilations[grammar_id] = _Compilation()
        self._in_background(lambda: self._run_compilation(grammar_id, constraint, compilation))
        return compilation

    def _in_background(self, job: Callable[[], object]) -> None:
        if self._threads is None:
            self._threads = BackgroundThreads("grammars", self._bounds.num_threads, lower_priority)
        self._threads.submit(job)

    def _run_compilation(
        self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, compilation: _Compilation
    ) -> None:
        opening_s = 0.0 if self._opened is not None else LONGEST_START_S  # it may be a process of its own
        clock = time.pthread_getcpuclockid(threading.get_ident())
        bounds = self._bounds
        bound = _CompileDeadline(
            clock, time.thread_time() + bounds.max_cpu_s + opening_s, time.monotonic() + bounds.max_wall_s + opening_s
        )
        self._watch(grammar_id, compilation, bound)
        started = time.perf_counter()
        grammar, error = self._compile(constraint)
        if compilation.watch is not None:
            compilation.watch.cancel()
        ready = (
            None
            if grammar is None
            else _CompiledEntry(grammar, max(constraint.ByteSize(), grammar.num_bytes // BYTES_OF_TEXT))
        )
        compile_us = max(1, round((time.perf_counter() - started) * 1e6))
        if (
            not self._finish_compilation(grammar_id, compilation, ready, CompileResult(error, compile_us))
            and self._threads is not None
        ):
            self._threads.remove_thread()  # this one has been replaced

    def _compile(self, constraint: sampling_pb2.StructuredOutput) -> tuple[Grammar | None, QuireError | None]:
        try:
            return self.backend.compile(constraint), None
        except QuireError as error:
            return None, error
        except BaseException as error:  # a library in Rust raises what is no Exception
            log.exception("a grammar could not be compiled")
            return None, Internal(f"structured_output: {type(error).__name__} while compiling")

    def _watch(self, grammar_id: bytes, compilation: _Compilation, bound: _CompileDeadline) -> None:
        """Gives up a thread that has used up its time, and else looks again when it may have."""
        if compilation.is_finished:
            return
        left_s = bound.left_s
        if left_s <= 0:
            self._abandon(grammar_id, compilation)
            return
        compilation.watch = threading.Timer(left_s, self._watch, (grammar_id, compilation, bound))
        compilation.watch.daemon = True
        compilation.watch.start()

    def _abandon(self, grammar_id: bytes, compilation: _Compilation) -> None:
        log.error("a grammar does not get compiled; its thread is left to itself", grammar=grammar_id.hex())
        error = InvalidArgument(f"{FIELD}: it takes more than {self._bounds.max_cpu_s:.0f} s to compile", field=FIELD)
        if (
            self._finish_compilation(
                grammar_id, compilation, None, CompileResult(error, round(self._bounds.max_cpu_s * 1e6))
            )
            and self._threads is not None
        ):
            self._threads.add_thread()

    def _finish_compilation(
        self, grammar_id: bytes, compilation: _Compilation, ready: _CompiledEntry | None, outcome: CompileResult
    ) -> bool:
        """Calls the waiting callbacks, the first with the time it took; returns False if it was finished before."""
        with self._lock:
            if compilation.is_finished:
                return False
            compilation.is_finished = True
            del self._compilations[grammar_id]
            if ready is not None:
                self._compiled[grammar_id] = ready
                if compilation.num_uses:
                    self._use_counts[grammar_id] += compilation.num_uses
                self._evict()
        for number, done in enumerate(compilation.waiting):
            done(outcome if number == 0 else CompileResult(outcome.error, 0))
        return True

    def _evict(self) -> None:
        unneeded = [name for name in self._compiled if name not in self._use_counts]
        num_bytes = sum(self._compiled[name].num_bytes for name in unneeded)
        for left, name in zip(range(len(unneeded), 0, -1), unneeded, strict=True):
            if left <= self._bounds.max_unused and num_bytes <= MAX_UNUSED_BYTES:
                return
            num_bytes -= self._compiled.pop(name).num_bytes
