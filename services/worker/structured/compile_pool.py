"""Compiles grammars in background threads, once each, and keeps them while the scheduler needs them and longer."""

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
MAX_CPU_S = 10.0  # CPU time per grammar; frontends validated it with a lower limit
MAX_WALL_S = 60.0  # wall-clock time per grammar: a busy machine may slow a library's subprocess, which has a CPU limit
# Cached grammars that no sequence uses: a compiled one takes up to a thousand times the size of its text.
MAX_UNUSED = 256
MAX_UNUSED_BYTES = 1 << 20  # of their texts
BYTES_OF_TEXT = 1000  # compiled bytes that count as one byte of text, if the library reports sizes


@dataclass(frozen=True, slots=True)
class CompilePoolLimits:
    """Number of threads, time limits per grammar, and size of the cache of unused grammars."""

    num_threads: int = NUM_THREADS
    max_cpu_s: float = MAX_CPU_S
    max_wall_s: float = MAX_WALL_S
    max_unused: int = MAX_UNUSED


LIMITS = CompilePoolLimits()


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Outcome of a request to compile a grammar."""

    error: QuireError | None
    compile_us: int  # 0: it was cached


OnCompiled = Callable[[CompileResult], None]


class MaskObserver(Protocol):
    """Receives timings of masks as metrics, from any thread."""

    def observe_mask_fill(self, seconds: float) -> None:
        """Observes the time to fill the masks of all sequences of a step, during the device's work."""

    def observe_mask_wait(self, seconds: float) -> None:
        """Observes the time that a step's sampling waited for its masks."""


class NoMaskObserver:
    """Observer that discards all timings of masks."""

    def observe_mask_fill(self, seconds: float) -> None:
        """Discards the duration."""

    def observe_mask_wait(self, seconds: float) -> None:
        """Discards the duration."""


@dataclass(slots=True)
class _Compilation:
    """A compilation in progress: the requests that wait for it, the references that they take, and the timer that
    watches it."""

    waiting: list[OnCompiled] = field(default_factory=list)
    num_uses: int = 0
    is_finished: bool = False
    watch: threading.Timer | None = None


@dataclass(frozen=True, slots=True)
class _CompileDeadline:
    """CPU and wall-clock deadline of a compiling thread."""

    clock: int
    thread_time_s: float
    monotonic_s: float

    @property
    def left_s(self) -> float:
        """Shortest time in which one of both deadlines may be reached."""
        return min(self.thread_time_s - time.clock_gettime(self.clock), self.monotonic_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class _CompiledEntry:
    """A cached grammar and its share of the cache's limit."""

    grammar: Grammar
    num_bytes: int  # size of its text, or the equivalent of its compiled size


class CompilePool:
    """Compiles grammars once each in background threads and caches them by id, counting references: a grammar prepared
    twice stays until it is released twice. Thread-safe."""

    def __init__(
        self,
        open_backend: Callable[[], GrammarBackend],
        observer: MaskObserver | None = None,
        limits: CompilePoolLimits = LIMITS,
    ) -> None:
        """`open_backend`: reads the vocabulary, called once for the first grammar; `observer`: receives timings of the
        masks."""
        self.observer: MaskObserver = observer or NoMaskObserver()
        self._open_backend, self._limits = open_backend, limits
        self._opening = threading.Lock()
        self._opened: GrammarBackend | None = None
        self._lock = threading.Lock()
        self._threads: BackgroundThreads | None = None
        self._compiled: OrderedDict[bytes, _CompiledEntry] = OrderedDict()  # least recently used first
        self._compilations: dict[bytes, _Compilation] = {}
        self._use_counts: Counter[bytes] = Counter()

    def prepare(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, done: OnCompiled) -> None:
        """Takes a reference to the grammar and compiles it in the background unless it is cached or being compiled.
        Calls `done` exactly once, from any thread (at once, from the caller's, if cached), with the error if there is
        one; a failed compilation holds no reference."""
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
        """Gives back one reference; a grammar without any stays cached until the limits of unused ones evict it."""
        with self._lock:
            self._use_counts[grammar_id] -= 1
            if self._use_counts[grammar_id] <= 0:
                del self._use_counts[grammar_id]
                self._evict()

    def release_all(self) -> None:
        """Drops all references, including those of compilations in progress, so that the grammars may be evicted."""
        with self._lock:
            self._use_counts.clear()
            for compilation in self._compilations.values():
                compilation.num_uses = 0
            self._evict()

    def grammar(self, grammar_id: bytes) -> Grammar | None:
        """Returns a compiled grammar; None if it was not prepared, failed, is being compiled, or was evicted after its
        release."""
        with self._lock:
            ready = self._compiled.get(grammar_id)
            return None if ready is None else ready.grammar

    def open_backend_early(self) -> None:
        """Opens the backend in the background: reading the vocabulary holds the GIL and would stall every stream when
        the first grammar arrives. Errors are raised where a grammar is requested."""
        with self._lock:
            self._in_background(lambda: self.backend)

    @property
    def backend(self) -> GrammarBackend:
        """The opened backend. Raises QuireError if it cannot be opened."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open_backend()
            return self._opened

    def _start_compilation(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput) -> _Compilation:
        """Registers a compilation without waiting requests and starts it in the background; called with the lock
        held."""
        compilation = self._compilations[grammar_id] = _Compilation()
        self._in_background(lambda: self._run_compilation(grammar_id, constraint, compilation))
        return compilation

    def _in_background(self, job: Callable[[], object]) -> None:
        """Runs `job` on one of the compiling threads, which are started on first use with lower priority."""
        if self._threads is None:
            self._threads = BackgroundThreads("grammars", self._limits.num_threads, lower_priority)
        self._threads.submit(job)

    def _run_compilation(
        self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, compilation: _Compilation
    ) -> None:
        """Compiles on the current thread under a deadline and reports the outcome. If it was abandoned meanwhile, drops
        the result and ends this thread, which another one has replaced."""
        opening_s = 0.0 if self._opened is not None else LONGEST_START_S  # a library may start a subprocess
        clock = time.pthread_getcpuclockid(threading.get_ident())
        limits = self._limits
        bound = _CompileDeadline(
            clock, time.thread_time() + limits.max_cpu_s + opening_s, time.monotonic() + limits.max_wall_s + opening_s
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
            self._threads.remove_thread()  # _abandon() has added another one

    def _compile(self, constraint: sampling_pb2.StructuredOutput) -> tuple[Grammar | None, QuireError | None]:
        """Returns the grammar or the error; any other exception, also a panic of a Rust library, is logged and becomes
        Internal."""
        try:
            return self.backend.compile(constraint), None
        except QuireError as error:
            return None, error
        except BaseException as error:  # a panic in Rust is not an Exception
            log.exception("grammar compilation failed")
            return None, Internal(f"structured_output: {type(error).__name__} while compiling")

    def _watch(self, grammar_id: bytes, compilation: _Compilation, bound: _CompileDeadline) -> None:
        """Abandons a compilation that has used up its time; otherwise starts a timer that checks again when it may
        have."""
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
        """Fails the compilation with InvalidArgument and adds a thread in place of the one that hangs in it."""
        log.error("grammar compilation exceeded its limit; abandoning the thread", grammar=grammar_id.hex())
        error = InvalidArgument(f"{FIELD}: it takes more than {self._limits.max_cpu_s:.0f} s to compile", field=FIELD)
        if (
            self._finish_compilation(
                grammar_id, compilation, None, CompileResult(error, round(self._limits.max_cpu_s * 1e6))
            )
            and self._threads is not None
        ):
            self._threads.add_thread()

    def _finish_compilation(
        self, grammar_id: bytes, compilation: _Compilation, ready: _CompiledEntry | None, outcome: CompileResult
    ) -> bool:
        """Stores the outcome and calls the waiting callbacks, the first one with the time it took, the others with 0;
        returns False, without effect, if it was finished before."""
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
        """Evicts the least recently used grammars without references until the rest is within the limits of number and
        size; called with the lock held."""
        unused = [name for name in self._compiled if name not in self._use_counts]
        num_bytes = sum(self._compiled[name].num_bytes for name in unused)
        for num_remaining, name in zip(range(len(unused), 0, -1), unused, strict=True):
            if num_remaining <= self._limits.max_unused and num_bytes <= MAX_UNUSED_BYTES:
                return
            num_bytes -= self._compiled.pop(name).num_bytes
