"""Grammars that take too long: each ends its own sequence, and the worker goes on."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire.services.worker.structured import mask_builder, slow_grammars, stream_gate
from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
from quire.services.worker.structured.compile_pool import CompileLimits, CompilePool, CompileResult
from quire.services.worker.structured.fair_filler import FairFiller
from quire.services.worker.structured.stream_gate import StreamGate
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from tests.services.worker.replica_internals import filler_of, runner_of
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import TINY, admit, hot, prepare, run, step
from tests.waiting import until


class Sequence_:
    """As far as a filler looks at it."""

    def __init__(self, seconds: float, tenant: str = "") -> None:
        self.matcher = seconds
        self.tenant = tenant
        self.advance_alone = False
        self.fill_alone = False
        self.token_s = 0.0
        self.cost_s = 0.0
        self.failed = ""

    def fail_as_too_slow(self, text: str) -> None:
        self.failed = text


class Busy:
    """Takes its time with every mask, and every token."""

    def accept(self, matchers: Sequence[float], token_ids: Sequence[int]) -> list[bool]:
        self.fill(matchers, [], None)
        return [True] * len(matchers)

    def fill(self, matchers: Sequence[float], places: Sequence[int], masks: Any) -> None:
        for seconds in matchers:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass


def test_only_the_slow_one_of_many_ends() -> None:
    sequences = [Sequence_(0), Sequence_(0.06), Sequence_(0)]
    filler = FairFiller(Busy())  # type: ignore[arg-type]
    for _ in range(4):
        filler.fill(sequences, [0, 1, 2], np.zeros((3, 1), dtype=np.int32))  # type: ignore[arg-type]
    assert [bool(s.failed) for s in sequences] == [False, True, False]
    assert sequences[1].failed.startswith("a token takes 6")
    assert not sequences[0].fill_alone


def rounds(sequences: list[Sequence_], count: int) -> None:
    """Steps with those that have not been ended."""
    filler = FairFiller(Busy())  # type: ignore[arg-type]
    for _ in range(count):
        live = [sequence for sequence in sequences if not sequence.failed]
        filler.fill(live, [*range(len(live))], np.zeros((len(live), 1), dtype=np.int32))  # type: ignore[arg-type]


def test_slow_grammars_that_use_up_a_step_together_end_until_the_rest_is_within_its_budget() -> None:
    """The most expensive first; none of them is too slow by itself."""
    sequences = [Sequence_(seconds) for seconds in (0, 0.003, 0.006, 0.009, 0.004)]
    rounds(sequences, 4)
    assert [bool(s.failed) for s in sequences] == [False, False, True, True, False]
    assert re.fullmatch(
        r"a token takes \d+ ms and all slow grammars of the tenant \d+ in a step, which may take 10; .*",
        sequences[3].failed,
    )


def test_many_quick_grammars_and_one_that_takes_most_of_a_step_are_within_the_budget() -> None:
    sequences = [*(Sequence_(0.0005) for _ in range(60)), Sequence_(0.007)]
    rounds(sequences, 6)
    assert not any(sequence.failed for sequence in sequences)


def test_a_slow_grammar_alone_keeps_to_the_budget_of_a_step_as_well() -> None:
    alone = Sequence_(0.03)
    rounds([alone], 3)
    assert "which may take 10;" in alone.failed


def test_a_slow_mask_now_and_then_ends_nothing() -> None:
    """The first mask of a place may take far longer than those after it."""
    rare, filler = Sequence_(0.0), FairFiller(Busy())  # type: ignore[arg-type]
    for number in range(24):
        rare.matcher = 0.04 if number % 8 == 7 else 0.0005
        filler.fill([rare], [0], np.zeros((1, 1), dtype=np.int32))  # type: ignore[arg-type]
    assert not rare.failed


def test_the_slow_grammars_of_one_tenant_end_and_none_of_another() -> None:
    """vLLM and SGLang compile and fill for all clients alike; here each tenant has its share of a step."""
    many = [Sequence_(0.004, "many") for _ in range(6)]
    one = Sequence_(0.004, "one")
    rounds([one, *many], 8)
    assert not one.failed
    assert sum(bool(sequence.failed) for sequence in many) == 5


def test_a_tenant_whose_sequences_were_ended_has_less_of_the_next_steps() -> None:
    filler = FairFiller(Busy())  # type: ignore[arg-type]

    def is_ended(seconds: float, tenant: str) -> bool:
        sequence = Sequence_(seconds, tenant)
        for _ in range(4):
            filler.fill([sequence], [0], np.zeros((1, 1), dtype=np.int32))  # type: ignore[arg-type]
        return bool(sequence.failed)

    assert not is_ended(0.007, "again")
    assert is_ended(0.015, "again")
    assert is_ended(0.007, "again")
    assert not is_ended(0.007, "another")


def test_who_takes_long_over_a_token_takes_the_next_alone() -> None:
    sequences, filler = [Sequence_(0), Sequence_(0.005)], FairFiller(Busy())  # type: ignore[arg-type]

    def is_quick() -> bool:
        alone = Sequence_(0)
        filler.accept([alone], [7])  # type: ignore[arg-type]
        return not alone.advance_alone

    assert any(is_quick() for _ in range(20))  # something else may have the processor
    assert filler.accept(sequences, [7, 7]) == [True, True]  # type: ignore[arg-type]
    assert all(sequence.advance_alone for sequence in sequences)
    assert not any(sequence.fill_alone for sequence in sequences)


@pytest.mark.parametrize("num_tokens", [500, 700])
def test_an_ambiguous_grammar_ends_before_it_stalls_anybody(tiny: Rig, tokenizer: Tokenizer, num_tokens: int) -> None:
    """Every token makes the next one, and the next mask, more expensive."""
    ambiguous = prepare(tiny, grammar='start: s\ns: s s s | s s | "a" | "aa" | "aaa"')
    digits = prepare(tiny, regex=r"\d+")
    new = [
        admit(tokenizer, 0, ambiguous, output=tokenizer.encode("a").ids * num_tokens),
        admit(tokenizer, 1, digits, sampling=hot(ignore_eos=True)),
    ]
    for number in range(60):
        step(tiny, new if number == 0 else None)
        if tiny.last_result.failures:
            break
    (failure,) = tiny.last_result.failures
    assert failure.slot == 0
    assert "structured_output: the grammar is too slow" in failure.error.message


def test_a_library_at_its_limits_ends_every_sequence_with_a_reason(tiny: Rig, tokenizer: Tokenizer) -> None:
    """The error names the limit, also of those that meet it while they take a token alone."""
    bomb = prepare(tiny, regex="(.*a.{0,30}b.*){20}")
    new = [admit(tokenizer, slot, bomb, sampling=hot(slot, temperature=2.0)) for slot in range(8)]
    texts: dict[int, str] = {}
    for number in range(199):
        step(tiny, new if number == 0 else None)
        failed = {failure.slot: failure.error.message for failure in tiny.last_result.failures}
        texts |= failed
        if len(texts) == len(new):
            break
    assert len(texts) == len(new)
    limit = "structured_output: the grammar became too complex: lexer error: too many "
    assert all(text.startswith(limit) for text in texts.values()), texts
    tiny.step(released=[*range(8)])


@pytest.mark.parametrize("alone", [True, False], ids=["a token alone", "tokens together"])
def test_a_limit_met_by_a_token_is_named(alone: bool) -> None:
    """All sequences of a grammar share its lexer's states: those of one can be used up by another."""
    backend = LLGuidanceBackend(TINY, 4096, [0])
    grammar, filler = backend.compile(pb.StructuredOutput(regex="(.*a.{0,30}b.*){20}")), backend.filler()
    chance, masks = np.random.default_rng(2), np.zeros((8, 128), dtype=np.int32)
    matchers, faults = [grammar.start() for _ in range(8)], list[str]()
    while matchers:
        filler.fill(matchers, [*range(len(matchers))], masks)
        faults += [matcher.fault for matcher in matchers if matcher.fault]
        rows = [row for row, matcher in enumerate(matchers) if not matcher.fault and masks[row].any()]
        tokens = [int(chance.choice(np.flatnonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little"))))
                  for row in rows]  # fmt: skip
        matchers = [matchers[row] for row in rows]
        pairs = zip(matchers, tokens, strict=True)
        together = not alone and matchers
        taken = (
            filler.accept(matchers, tokens) if together else [matcher.accept_sampled(token) for matcher, token in pairs]
        )
        refused = [matcher.fault for matcher, is_right in zip(matchers, taken, strict=True) if not is_right]
        faults += refused
        assert all(refused), "refused without a reason"
        matchers = [matcher for matcher, is_right in zip(matchers, taken, strict=True) if is_right]
    assert faults
    assert all("lexer error: too many" in fault for fault in faults)


def test_a_grammar_that_was_too_slow_too_often_is_refused(tiny: Rig, tokenizer: Tokenizer) -> None:
    slow, digits = prepare(tiny, grammar='start: s\ns: s s s | s s | "a" | "aa"'), prepare(tiny, regex=r"\d+")
    masks = runner_of(tiny.replica).sampler.grammar_masks
    for _ in range(slow_grammars.MAX_ENDED):
        step(tiny, [admit(tokenizer, 0, slow), admit(tokenizer, 1, digits, sampling=hot(ignore_eos=True))])
        assert not tiny.last_result.failures
        masks.slots[0].fail_as_too_slow("7 tokens took 1.0 s")
        tiny.step(released=[0, 1])
    step(tiny, [admit(tokenizer, 0, slow), admit(tokenizer, 1, digits)])
    (failure,) = tiny.last_result.failures
    assert failure.slot == 0
    assert failure.error.message.startswith("structured_output: the grammar is too slow: 3 sequences under it were")
    tiny.step(released=[0, 1])


def test_slow_grammars_are_forgotten_one_by_one() -> None:
    slow = slow_grammars.SlowGrammars(remembered=2)
    for name in (b"a", b"b", b"a", b"a", b"c"):
        slow.record_ended(name)
    slow.check(b"b")
    with pytest.raises(InvalidArgument, match="too slow: 3 sequences"):
        slow.check(b"a")
    slow.record_ended(b"d")
    slow.check(b"a")


def test_a_slow_grammar_is_refused_for_a_while_and_then_tried_again() -> None:
    slow, refused = slow_grammars.SlowGrammars(), []
    for _ in range(slow_grammars.MAX_ENDED):
        slow.check(b"a")
        slow.record_ended(b"a")
    for _ in range(2 * (slow_grammars.MAX_REFUSED + 1)):
        try:
            slow.check(b"a")
        except InvalidArgument:
            refused.append(True)
        else:
            refused.append(False)
    each = [True] * slow_grammars.MAX_REFUSED + [False]
    assert refused == each + each


def test_masks_that_never_come_end_the_step_and_not_the_worker(
    tiny: Rig, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = prepare(tiny, regex=r"\d{3}")
    run(tiny, [admit(tokenizer, 0, digits)])
    tiny.step(released=[0])
    hanging = threading.Event()
    filler = filler_of(tiny.replica)
    monkeypatch.setattr(filler, "fill", lambda *_: hanging.wait(60))
    with monkeypatch.context() as impatient:
        impatient.setattr(mask_builder, "MAX_WAIT_S", 0.2)
        with pytest.raises(Internal, match="grammar masks were not built within"):
            step(tiny, [admit(tokenizer, 0, digits)])
    tiny.end_epoch()
    said = run(tiny, [admit(tokenizer, 1, digits)])
    assert tokenizer.decode(said[1][:-1]).isdigit()
    hanging.set()


class Late(Future[None]):
    """Is waited for in vain some times: the process stood still, or what makes it is slow."""

    def __init__(self, num_times: int) -> None:
        super().__init__()
        self.num_times = num_times
        self.waited_s = 0.0

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self.num_times == 0:
            self.set_result(None)
            return None
        assert timeout is not None
        self.num_times -= 1
        self.waited_s += timeout
        raise TimeoutError


def test_a_process_that_stands_still_for_long_loses_a_turn_of_waiting_and_no_step(tiny: Rig) -> None:
    builder = runner_of(tiny.replica).sampler.grammar_masks.builder
    mask_builder.wait(late := Late(mask_builder.MAX_WAIT_SLICES - 1), builder)
    assert late.done()
    never = Late(mask_builder.MAX_WAIT_SLICES)
    with pytest.raises(Internal, match="grammar masks were not built within 5 s"):
        mask_builder.wait(never, builder)
    assert never.waited_s == pytest.approx(mask_builder.MAX_WAIT_S)
    assert builder.is_hung
    tiny.end_epoch()


class Written:
    """The number of a gate: another thread gives the masks up in the moment before it is first written."""

    def __init__(self, gate: StreamGate) -> None:
        self.gate, self.value = gate, -1

    def __setitem__(self, _: int, value: np.int32) -> None:
        if not self.gate._is_open:
            self.gate.open_permanently()
        self.value = int(value)


def test_a_gate_that_is_opened_while_a_number_is_reached_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the device's stream would wait for the masks after it for ever, which nobody tells it of any more."""
    here = SimpleNamespace(Stream=object, Event=object)
    zeros = lambda count, *, dtype, pin_memory: torch.zeros(count, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(stream_gate, "torch", SimpleNamespace(zeros=zeros, int32=torch.int32, cuda=here))
    gate = StreamGate()
    gate._number = number = Written(gate)  # type: ignore[assignment]
    gate.advance_to(1)
    assert number.value > stream_gate.FAR_AHEAD


class Named(str):
    """As far as a pool looks at a grammar."""

    num_bytes = 0


class Hanging:
    """Compiles until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def compile(self, constraint: pb.StructuredOutput) -> Named:
        if constraint.regex == "hang":
            self.let_go.wait(60)
        return Named(constraint.regex)


def test_the_vocabulary_is_read_before_the_first_grammar() -> None:
    """That holds Python's lock, and so every stream: 60 ms for 4,096 tokens."""
    backend, opened = Hanging(), threading.Event()

    def open_backend() -> Hanging:
        opened.set()
        return backend

    pool = CompilePool(open_backend)  # type: ignore[arg-type]
    pool.open_backend_early()
    assert opened.wait(60)
    assert pool.backend is backend


def test_a_grammar_that_never_gets_compiled_is_given_up_and_others_are_compiled() -> None:
    backend = Hanging()
    bounds = CompileLimits(num_threads=1, max_wall_s=3)  # also for the one that is compiled
    pool = CompilePool(lambda: backend, bounds=bounds)  # type: ignore[arg-type, return-value]
    assert pool.backend is backend
    outcomes: queue.SimpleQueue[tuple[str, CompileResult]] = queue.SimpleQueue()
    for name in ("hang", "next"):
        pool.prepare(
            name.encode(), pb.StructuredOutput(regex=name), lambda prepared, name=name: outcomes.put((name, prepared))
        )
    first, second = outcomes.get(timeout=60), outcomes.get(timeout=60)
    assert first[0] == "hang"
    assert isinstance(first[1].error, InvalidArgument)
    assert first[1].error.message == "structured_output: it takes more than 10 s to compile"
    assert second[0] == "next"
    assert pool.grammar(b"next") == "next"
    assert pool.grammar(b"hang") is None
    backend.let_go.set()


def test_a_thread_that_comes_back_after_it_was_given_up_is_none_too_many() -> None:
    """Else each slow grammar would leave one more, and one more process that compiles."""
    before, backend = {*threading.enumerate()}, Hanging()
    bounds = CompileLimits(num_threads=1, max_wall_s=0.05)
    pool = CompilePool(lambda: backend, bounds=bounds)  # type: ignore[arg-type, return-value]
    assert pool.backend is backend
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    for name in (b"first", b"second"):
        backend.let_go.clear()
        pool.prepare(name, pb.StructuredOutput(regex="hang"), outcomes.put)
        assert isinstance(outcomes.get(timeout=60).error, InvalidArgument)
        backend.let_go.set()

    def own_threads() -> int:
        new = {*threading.enumerate()} - before
        return sum(thread.name == "grammars" for thread in new)

    until(lambda: own_threads() == 1)


def test_time_to_compile_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's process that waits for a busy machine has a bound of its own, in its own time."""
    looks: list[float] = []
    began = threading.Timer.start

    def start(timer: threading.Timer) -> None:
        looks.append(timer.interval)
        if len(looks) == 4:
            backend.let_go.set()
        began(timer)

    monkeypatch.setattr(threading.Timer, "start", start)
    backend = Hanging()
    pool = CompilePool(lambda: backend, bounds=CompileLimits(max_cpu_s=0.05))  # type: ignore[arg-type, return-value]
    assert pool.backend is backend
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    pool.prepare(b"hang", pb.StructuredOutput(regex="hang"), outcomes.put)
    assert outcomes.get(timeout=60).error is None
    assert len(looks) >= 4


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


def test_a_library_that_panics_has_answered() -> None:
    """It is not waited for, and its thread goes on."""

    class Panicking:
        def compile(self, _: pb.StructuredOutput) -> None:
            raise Panic("index out of bounds")

    pool = CompilePool(Panicking)  # type: ignore[arg-type]
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    pool.prepare(b"x", pb.StructuredOutput(regex="x"), outcomes.put)
    error = outcomes.get(timeout=60).error
    assert isinstance(error, Internal)
    assert error.message == "structured_output: Panic while compiling"


def test_grammars_stay_while_they_are_needed_and_then_as_long_as_there_is_room() -> None:
    pool = CompilePool(Hanging, bounds=CompileLimits(max_unused=2))  # type: ignore[arg-type]
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    names = [str(i).encode() for i in range(5)]
    for name in names:
        pool.prepare(name, pb.StructuredOutput(regex=name.decode()), outcomes.put)
        assert outcomes.get(timeout=60).error is None
    pool.prepare(names[0], pb.StructuredOutput(regex="0"), outcomes.put)
    assert outcomes.get(timeout=60).compile_us == 0
    for name in names:
        pool.release(name)
    assert [pool.grammar(name) is not None for name in names] == [True, False, False, True, True]
    pool.release(names[0])  # needed twice
    assert [pool.grammar(name) is not None for name in names] == [True, False, False, False, True]


@pytest.mark.parametrize("multiple", [2, 5, 0.01, 60, 100, 1000])
def test_multiples_that_the_door_lets_in_can_be_followed(multiple: float) -> None:
    backend = LLGuidanceBackend(TINY, 4096, [0])
    schema = f'{{"type": "number", "multipleOf": {multiple}, "minimum": 1, "maximum": 1000000}}'
    matcher = backend.compile(pb.StructuredOutput(json_schema=schema)).start()
    filler, mask = backend.filler(), np.zeros((1, 128), dtype=np.int32)
    for digit in Tokenizer.from_file(str(Path(TINY) / "tokenizer.json")).encode("6000").ids:
        filler.fill([matcher], [0], mask)
        assert matcher.fault == ""
        assert matcher.accept([digit]) == 1
    assert matcher.can_end
