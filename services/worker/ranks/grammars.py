"""Grammars of a rank other than rank 0."""

from __future__ import annotations

import threading

from quire.services.worker.step.plan import StepPlan
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared.errors import DeadlineExceeded
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

COMPILE_TIMEOUT_S = 30.0  # all ranks start at the same time, and rank 0 has finished when a plan arrives


class _Compilation:
    """A grammar being compiled, and its result."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.prepared: CompileResult | None = None

    def done(self, prepared: CompileResult) -> None:
        self.prepared = prepared
        self.finished.set()


class FollowerGrammars:
    """Grammars compiled in parallel with rank 0; a plan that uses one waits for it."""

    def __init__(self, pool: CompilePool) -> None:
        self._pool = pool
        self._compilations: dict[bytes, _Compilation] = {}

    def prepare(self, order: pb.PrepareGrammar) -> None:
        """Starts compiling a grammar in the background."""
        compilation = self._compilations[order.grammar_id] = _Compilation()
        constraint = sampling_pb2.StructuredOutput.FromString(order.grammar)
        self._pool.prepare(order.grammar_id, constraint, compilation.done)

    def release(self, grammar_id: bytes) -> None:
        """Releases a grammar; an unfinished compilation stays known until release_all()."""
        order = self._compilations.get(grammar_id)
        if order is not None and order.finished.is_set():
            del self._compilations[grammar_id]  # no plan waits for it
        self._pool.release(grammar_id)

    def release_all(self) -> None:
        self._compilations.clear()
        self._pool.release_all()

    def await_grammars_of(self, plan: StepPlan) -> None:
        """Waits for the grammars of a plan. Raises DeadlineExceeded after 30 s, and the error of a failed one: rank 0
        has compiled it, so this rank cannot continue."""
        for admission in plan.changes.admitted:
            order = self._compilations.get(admission.grammar_id) if admission.grammar_id else None
            if order is None:
                continue
            if not order.finished.wait(COMPILE_TIMEOUT_S):
                raise DeadlineExceeded(
                    f"grammar {admission.grammar_id.hex()} is not ready after {COMPILE_TIMEOUT_S:g} s"
                )
            if order.prepared is not None and order.prepared.error is not None:
                raise order.prepared.error
