"""Grammars by name: compiled in threads of their own, once each, kept while the scheduler needs them and longer."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.services.worker.host.background import Background
from quire.services.worker.structured.port import Grammar, GrammarBackend
from quire.shared.errors import Internal, InvalidArgument, QuireError
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import LONGEST_START_S
from quire.shared.process.priority import step_back
from quire.shared.structured_output.checks import FIELD

log = logger("worker.grammars")

NUM_THREADS = min(4, max(1, (os.cpu_count() or 1) // 2))
PATIENCE_S = 10.0  # of the thread's processor time, with a grammar that frontends, with less patience, have let in
LONGEST_S = 60.0  # by the clock: a library's own process is bounded in its processor time, on a machine that is busy
# Grammars that stay though no sequence needs them: a compiled one takes up to a thousand times its text.
MOST_UNNEEDED = 256
MOST_UNNEEDED_BYTES = 1 << 20  # of text
BYTES_OF_TEXT = 1000  # that count as one of text, of a library that knows what its grammars take


@dataclass(frozen=True, slots=True)
class CompileBounds:
    """How much may be compiled at a time, and how long one grammar may take."""

    num_threads: int = NUM_THREADS
    patience_s: float = PATIENCE_S
    longest_s: float = LONGEST_S
    most_unneeded: int = MOST_UNNEEDED


BOUNDS = CompileBounds()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What came of an order."""

    error: QuireError | None
    compile_us: int  # 0: it was there


Done = Callable[[Prepared], None]


class MaskObserver(Protocol):
    """Is told how long masks take, from any thread."""

    def masks_filled(self, seconds: float) -> None:
        """Those of all sequences of a step, beside the device's work."""

    def masks_awaited(self, seconds: float) -> None:
        """A step's sampling had to wait for them."""


class NoMetrics:
    """Where there are no metrics."""

    def masks_filled(self, seconds: float) -> None:
        """Not measured."""

    def masks_awaited(self, seconds: float) -> None:
        """Not measured."""


@dataclass(slots=True)
class _Making:
    """A grammar that is being compiled."""

    waiting: list[Done] = field(default_factory=list)
    num_needs: int = 0
    over: bool = False
    watch: threading.Timer | None = None


@dataclass(frozen=True, slots=True)
class _Bound:
    """The time that a thread may take: its own, and the clock's."""

    clock: int
    thread_time_s: float
    monotonic_s: float

    @property
    def left_s(self) -> float:
        """The least time in which one of both may be used up."""
        return min(self.thread_time_s - time.clock_gettime(self.clock), self.monotonic_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class _Ready:
    grammar: Grammar
    num_bytes: int  # of its text, or of what stands for it


class CompilePool:
    """`prepare` and `release` count: what is prepared twice stays until it is released twice. Any thread may call."""

    def __init__(
        self,
        open_backend: Callable[[], GrammarBackend],
        observer: MaskObserver | None = None,
        bounds: CompileBounds = BOUNDS,
    ) -> None:
        """`open_backend` reads the vocabulary; called once, when the first grammar is wanted. `observer`: of the masks
        that are made with the grammars."""
        self.observer: MaskObserver = observer or NoMetrics()
        self._open_backend, self._bounds = open_backend, bounds
        self._opening = threading.Lock()
        self._opened: GrammarBackend | None = None
        self._lock = threading.Lock()
        self._threads: Background | None = None
        self._ready: OrderedDict[bytes, _Ready] = OrderedDict()  # least recently wanted first
        self._making: dict[bytes, _Making] = {}
        self._needs: Counter[bytes] = Counter()

    def prepare(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, done: Done) -> None:
        """`done` is called once, from any thread."""
        with self._lock:
            if grammar_id not in self._ready:
                making = self._making.get(grammar_id) or self._begin(grammar_id, constraint)
                making.waiting.append(done)
                making.num_needs += 1
                return
            self._ready.move_to_end(grammar_id)
            self._needs[grammar_id] += 1
        done(Prepared(None, 0))

    def release(self, grammar_id: bytes) -> None:
        with self._lock:
            self._needs[grammar_id] -= 1
            if self._needs[grammar_id] <= 0:
                del self._needs[grammar_id]
                self._evict()

    def release_all(self) -> None:
        """All grammars may go."""
        with self._lock:
            self._needs.clear()
            for making in self._making.values():
                making.num_needs = 0
            self._evict()

    def grammar(self, grammar_id: bytes) -> Grammar | None:
        """None if it has not been prepared, or has been released."""
        with self._lock:
            ready = self._ready.get(grammar_id)
            return None if ready is None else ready.grammar

    def look_ahead(self) -> None:
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

    def _begin(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput) -> _Making:
        making = self._making[grammar_id] = _Making()
        self._in_background(lambda: self._make(grammar_id, constraint, making))
        return making

    def _in_background(self, job: Callable[[], object]) -> None:
        if self._threads is None:
            self._threads = Background("grammars", self._bounds.num_threads, step_back)
        self._threads.submit(job)

    def _make(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, making: _Making) -> None:
        opening_s = 0.0 if self._opened is not None else LONGEST_START_S  # it may be a process of its own
        clock = time.pthread_getcpuclockid(threading.get_ident())
        bounds = self._bounds
        bound = _Bound(
            clock, time.thread_time() + bounds.patience_s + opening_s, time.monotonic() + bounds.longest_s + opening_s
        )
        self._watch(grammar_id, making, bound)
        started = time.perf_counter()
        grammar, error = self._compile(constraint)
        if making.watch is not None:
            making.watch.cancel()
        ready = (
            None if grammar is None else _Ready(grammar, max(constraint.ByteSize(), grammar.num_bytes // BYTES_OF_TEXT))
        )
        compile_us = max(1, round((time.perf_counter() - started) * 1e6))
        if not self._finish(grammar_id, making, ready, Prepared(error, compile_us)) and self._threads is not None:
            self._threads.remove_thread()  # this one has been replaced

    def _compile(self, constraint: sampling_pb2.StructuredOutput) -> tuple[Grammar | None, QuireError | None]:
        try:
            return self.backend.compile(constraint), None
        except QuireError as error:
            return None, error
        except BaseException as error:  # a library in Rust raises what is no Exception
            log.exception("a grammar could not be compiled")
            return None, Internal(f"structured_output: {type(error).__name__} while compiling")

    def _watch(self, grammar_id: bytes, making: _Making, bound: _Bound) -> None:
        """Gives up a thread that has used up its time, and else looks again when it may have."""
        if making.over:
            return
        left_s = bound.left_s
        if left_s <= 0:
            self._give_up(grammar_id, making)
            return
        making.watch = threading.Timer(left_s, self._watch, (grammar_id, making, bound))
        making.watch.daemon = True
        making.watch.start()

    def _give_up(self, grammar_id: bytes, making: _Making) -> None:
        log.error("a grammar does not get compiled; its thread is left to itself", grammar=grammar_id.hex())
        error = InvalidArgument(f"{FIELD}: it takes more than {self._bounds.patience_s:.0f} s to compile", field=FIELD)
        if (
            self._finish(grammar_id, making, None, Prepared(error, round(self._bounds.patience_s * 1e6)))
            and self._threads is not None
        ):
            self._threads.add_thread()

    def _finish(self, grammar_id: bytes, making: _Making, ready: _Ready | None, outcome: Prepared) -> bool:
        """The first that asked is told the time it took; for the others it was there. False if it was over before."""
        with self._lock:
            if making.over:
                return False
            making.over = True
            del self._making[grammar_id]
            if ready is not None:
                self._ready[grammar_id] = ready
                if making.num_needs:
                    self._needs[grammar_id] += making.num_needs
                self._evict()
        for number, done in enumerate(making.waiting):
            done(outcome if number == 0 else Prepared(outcome.error, 0))
        return True

    def _evict(self) -> None:
        unneeded = [name for name in self._ready if name not in self._needs]
        num_bytes = sum(self._ready[name].num_bytes for name in unneeded)
        for left, name in zip(range(len(unneeded), 0, -1), unneeded, strict=True):
            if left <= self._bounds.most_unneeded and num_bytes <= MOST_UNNEEDED_BYTES:
                return
            num_bytes -= self._ready.pop(name).num_bytes
