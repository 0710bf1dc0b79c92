"""Grammars by name: compiled in threads of their own, once each, kept while the scheduler needs them and longer."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from services.worker.structured.port import Grammar, GrammarBackend
from shared.errors import Internal, QuireError
from shared.logs import logger
from shared.pb.common.v1 import sampling_pb2

log = logger("worker.grammars")

MOST_UNNEEDED = 256  # grammars that stay though the scheduler has released them; 10 to 100 KB each
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """What came of an order."""

    error: QuireError | None
    compile_us: int  # 0: it was there


Done = Callable[[Prepared], None]
Making = Future[Prepared]


class CompilePool:
    """`prepare` and `release` count: what is prepared twice stays until it is released twice. Any thread may call."""

    def __init__(self, open_backend: Callable[[], GrammarBackend]) -> None:
        """`open_backend` reads the vocabulary; called once, when the first grammar is wanted."""
        self._open_backend = open_backend
        self._opening = threading.Lock()
        self._opened: GrammarBackend | None = None
        threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._ready: OrderedDict[bytes, Grammar] = OrderedDict()  # least recently wanted first
        self._making: dict[bytes, Making] = {}
        self._needs: Counter[bytes] = Counter()

    def prepare(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, done: Done) -> None:
        """`done` is called once, from any thread."""
        with self._lock:
            self._needs[grammar_id] += 1
            if grammar_id in self._ready:
                self._ready.move_to_end(grammar_id)
                making = None
            else:
                making = self._making.get(grammar_id) or self._begin(grammar_id, constraint)
        if making is None:
            done(Prepared(None, 0))
        else:
            making.add_done_callback(lambda made: self._tell(grammar_id, made.result(), done))

    def release(self, grammar_id: bytes) -> None:
        with self._lock:
            self._unneed(grammar_id)

    def release_all(self) -> None:
        """Nobody needs anything any more."""
        with self._lock:
            self._needs.clear()
            self._evict()

    def grammar(self, grammar_id: bytes) -> Grammar | None:
        """None if it has not been prepared, or has been released."""
        with self._lock:
            return self._ready.get(grammar_id)

    @property
    def backend(self) -> GrammarBackend:
        """Raises QuireError if there can be none."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open_backend()
            return self._opened

    def _begin(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput) -> Making:
        making = self._threads.submit(self._make, grammar_id, constraint)
        self._making[grammar_id] = making
        return making

    def _make(self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput) -> Prepared:
        started = time.perf_counter()
        grammar, error = self._compile(constraint)
        with self._lock:
            del self._making[grammar_id]
            if grammar is not None:
                self._ready[grammar_id] = grammar
                self._evict()
        return Prepared(error, max(1, round((time.perf_counter() - started) * 1e6)))

    def _compile(self, constraint: sampling_pb2.StructuredOutput) -> tuple[Grammar | None, QuireError | None]:
        try:
            return self.backend.compile(constraint), None
        except QuireError as error:
            return None, error
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return None, Internal(f"structured_output: {type(error).__name__} while compiling")

    def _tell(self, grammar_id: bytes, prepared: Prepared, done: Done) -> None:
        if prepared.error is not None:
            with self._lock:
                self._unneed(grammar_id)  # nobody will release what there never was
        done(prepared)

    def _unneed(self, grammar_id: bytes) -> None:
        self._needs[grammar_id] -= 1
        if self._needs[grammar_id] <= 0:
            del self._needs[grammar_id]
            self._evict()

    def _evict(self) -> None:
        unneeded = [grammar_id for grammar_id in self._ready if grammar_id not in self._needs]
        for grammar_id in unneeded[: max(0, len(unneeded) - MOST_UNNEEDED)]:
            del self._ready[grammar_id]
