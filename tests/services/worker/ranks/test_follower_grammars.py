"""A rank has a grammar before it launches a step that uses it, or reports why it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.services.worker.ranks.grammars import FollowerGrammars
from quire.services.worker.step.plan import Admission, PlanChanges, StepPlan
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

REGEX = sampling_pb2.StructuredOutput(regex="a+").SerializeToString()
ORDER = pb.PrepareGrammar(grammar_id=b"g", grammar=REGEX)
PLAN = StepPlan(1, 1, changes=PlanChanges(admitted=[Admission(slot=0, grammar_id=b"g")]))


class PaperPool(CompilePool):
    """A fake pool that compiles when the test lets it."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, Callable[[CompileResult], None]] = {}
        self.released: list[bytes] = []

    def prepare(
        self, grammar_id: bytes, constraint: sampling_pb2.StructuredOutput, done: Callable[[CompileResult], None]
    ) -> None:
        assert constraint.regex == "a+"
        self.waiting[grammar_id] = done

    def release(self, grammar_id: bytes) -> None:
        self.released.append(grammar_id)


def test_a_plan_waits_for_the_grammar_that_it_names() -> None:
    pool = PaperPool()
    grammars = FollowerGrammars(pool)
    grammars.prepare(ORDER)
    grammars.await_grammars_of(StepPlan(1, 1, changes=PlanChanges(admitted=[Admission(slot=0)])))  # names none
    pool.waiting[b"g"](CompileResult(None, 5))
    grammars.await_grammars_of(PLAN)
    grammars.release(b"g")
    assert pool.released == [b"g"]


def test_a_grammar_that_failed_here_ends_the_step() -> None:
    pool = PaperPool()
    grammars = FollowerGrammars(pool)
    grammars.prepare(ORDER)
    pool.waiting[b"g"](CompileResult(InvalidArgument("too large", field="grammar"), 5))
    with pytest.raises(InvalidArgument, match="too large"):
        grammars.await_grammars_of(PLAN)
