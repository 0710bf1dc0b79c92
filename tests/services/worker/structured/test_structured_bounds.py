"""Limits of slow grammars: each ends its own sequence, and the worker continues."""

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
from quire.services.worker.structured.compile_pool import CompilePool, CompilePoolLimits, CompileResult
from quire.services.worker.structured.fair_filler import FairFiller, noticeable_s
from quire.services.worker.structured.stream_gate import StreamGate
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from tests.observing import ObservedCall, calls_of
from tests.services.worker.replica_internals import filler_of, runner_of
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import TINY, admit, hot, prepare, run, step
from tests.waiting import until


class FakeSequence:
    """The part of a sequence that a filler uses."""

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


LARGE_MASK = 150_000 // 32  # words


class SlowFiller:
    """Filler that takes a given time for every mask and token."""

    def accept(self, matchers: Sequence[float], token_ids: Sequence[int]) -> list[bool]:
        self.fill(matchers, [], None)
        return [True] * len(matchers)

    def fill(self, matchers: Sequence[float], places: Sequence[int], masks: Any) -> None:
        for seconds in matchers:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass


def test_only_the_slow_sequence_of_many_ends() -> None:
    sequences = [FakeSequence(0), FakeSequence(0.06), FakeSequence(0)]
    filler = FairFiller(SlowFiller())  # type: ignore[arg-type]
    for _ in range(4):
        filler.fill(sequences, [0, 1, 2], np.zeros((3, 1), dtype=np.int32))  # type: ignore[arg-type]
    assert [bool(s.failed) for s in sequences] == [False, True, False]
    assert sequences[1].failed.startswith("a token takes 6")
    assert not sequences[0].fill_alone


def rounds(sequences: list[FakeSequence], count: int, num_words: int = LARGE_MASK) -> None:
    """Runs steps with the sequences that have not ended."""
    filler = FairFiller(SlowFiller())  # type: ignore[arg-type]
    for _ in range(count):
        live = [sequence for sequence in sequences if not sequence.failed]
        masks = np.zeros((len(live), num_words), dtype=np.int32)
        filler.fill(live, [*range(len(live))], masks)  # type: ignore[arg-type]


def test_slow_grammars_end_until_the_rest_is_within_the_step_budget() -> None:
    """The most expensive ones end first; none of them is too slow alone."""
    sequences = [FakeSequence(seconds) for seconds in (0, 0.003, 0.006, 0.009, 0.004)]
    rounds(sequences, 4)
    assert [bool(s.failed) for s in sequences] == [False, False, True, True, False]
    assert re.fullmatch(
        r"a token takes \d+ ms and all slow grammars of the tenant \d+ in a step, which may take 10; .*",
        sequences[3].failed,
    )


def test_many_fast_grammars_and_a_slow_one_fit_the_budget() -> None:
    sequences = [*(FakeSequence(0.0005) for _ in range(60)), FakeSequence(0.007)]
    rounds(sequences, 6)
    assert not any(sequence.failed for sequence in sequences)


def test_masks_over_a_small_vocabulary_are_slow_earlier() -> None:
    """Thirty grammars of 0.7 ms each are usual ones with a large vocabulary, and delay every step without need with a
    small one."""
    assert noticeable_s(4096) < 0.0007 < noticeable_s(LARGE_MASK * 32)
    few, many = ([FakeSequence(0.0007) for _ in range(30)] for _ in range(2))
    rounds(many, 6)
    assert not any(sequence.failed for sequence in many)
    rounds(few, 6, num_words=4096 // 32)
    assert any(sequence.failed for sequence in few)
    assert sum(sequence.cost_s for sequence in few if not sequence.failed) < 0.011


class AmbiguousFiller(SlowFiller):
    """Filler whose masks take longer with every token, as those of an ambiguous grammar do."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def fill(self, matchers: Sequence[float], places: Sequence[int], masks: Any) -> None:
        began = time.thread_time()
        super().fill([seconds * 1.1 ** len(self.steps_s) for seconds in matchers], places, masks)
        self.spent_s += time.thread_time() - began

    spent_s = 0.0


def test_masks_that_grow_are_ended_before_they_take_twice_the_budget() -> None:
    """Sixteen ambiguous grammars of one tenant, with times as measured with the bundled model."""
    ambiguous = AmbiguousFiller()
    filler = FairFiller(ambiguous)  # type: ignore[arg-type]
    sequences = [FakeSequence(0.00005) for _ in range(16)]
    while any(not sequence.failed for sequence in sequences) and len(ambiguous.steps_s) < 60:
        live = [sequence for sequence in sequences if not sequence.failed]
        ambiguous.spent_s = 0.0
        filler.fill(live, [*range(len(live))], np.zeros((16, 4096 // 32), dtype=np.int32))  # type: ignore[arg-type]
        ambiguous.steps_s.append(ambiguous.spent_s)
    assert max(ambiguous.steps_s) < 0.021


def test_a_single_slow_grammar_is_limited_by_the_step_budget() -> None:
    alone = FakeSequence(0.03)
    rounds([alone], 3)
    assert "which may take 10;" in alone.failed


def test_an_occasional_slow_mask_ends_nothing() -> None:
    """The first mask at a position may take far longer than later ones."""
    rare, filler = FakeSequence(0.0), FairFiller(SlowFiller())  # type: ignore[arg-type]
    for number in range(24):
        rare.matcher = 0.04 if number % 8 == 7 else 0.0005
        filler.fill([rare], [0], np.zeros((1, 1), dtype=np.int32))  # type: ignore[arg-type]
    assert not rare.failed


def test_the_slow_grammars_of_one_tenant_end_and_none_of_another() -> None:
    """vLLM and SGLang compile and fill for all clients alike; here each tenant has a share of a step."""
    many = [FakeSequence(0.004, "many") for _ in range(6)]
    one = FakeSequence(0.004, "one")
    rounds([one, *many], 8)
    assert not one.failed
    assert sum(bool(sequence.failed) for sequence in many) == 5


def test_a_tenant_with_ended_sequences_gets_a_smaller_share() -> None:
    filler = FairFiller(SlowFiller())  # type: ignore[arg-type]

    def is_ended(seconds: float, tenant: str) -> bool:
        sequence = FakeSequence(seconds, tenant)
        for _ in range(4):
            filler.fill([sequence], [0], np.zeros((1, 1), dtype=np.int32))  # type: ignore[arg-type]
        return bool(sequence.failed)

    assert not is_ended(0.007, "again")
    assert is_ended(0.015, "again")
    assert is_ended(0.007, "again")
    assert not is_ended(0.007, "another")


def test_a_sequence_with_a_slow_token_advances_alone() -> None:
    sequences, filler = [FakeSequence(0), FakeSequence(0.005)], FairFiller(SlowFiller())  # type: ignore[arg-type]

    def is_quick() -> bool:
        alone = FakeSequence(0)
        filler.accept([alone], [7])  # type: ignore[arg-type]
        return not alone.advance_alone

    assert any(is_quick() for _ in range(20))  # other processes may use the CPU
    assert filler.accept(sequences, [7, 7]) == [True, True]  # type: ignore[arg-type]
    assert all(sequence.advance_alone for sequence in sequences)
    assert not any(sequence.fill_alone for sequence in sequences)


@pytest.mark.parametrize("num_tokens", [500, 700])
def test_an_ambiguous_grammar_ends_before_it_stalls_other_sequences(
    tiny: Rig, tokenizer: Tokenizer, num_tokens: int
) -> None:
    """Every token makes the next token and mask more expensive."""
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
    """The error names the limit, also for sequences that reach it while consuming a token separately."""
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
def test_the_error_names_a_limit_reached_by_a_token(alone: bool) -> None:
    """All sequences of a grammar share its lexer states, so that one may exhaust them for another."""
    backend = LLGuidanceBackend(TINY, 4096, [0])
    grammar, filler = backend.compile(pb.StructuredOutput(regex="(.*a.{0,30}b.*){20}")), backend.filler()
    chance, masks = np.random.default_rng(2), np.zeros((8, 128), dtype=np.int32)
    matchers, faults = [grammar.new_matcher() for _ in range(8)], list[str]()
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


def test_the_oldest_slow_grammars_are_dropped_first() -> None:
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


def test_a_hanging_filler_fails_the_step_and_not_the_worker(
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


class SlowFuture(Future[None]):
    """A future that times out a given number of times, as if the process was stopped or the filler was slow."""

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


def test_a_stopped_process_loses_a_wait_slice_and_no_step(tiny: Rig) -> None:
    builder = runner_of(tiny.replica).sampler.grammar_masks.builder
    mask_builder.wait(late := SlowFuture(mask_builder.MAX_WAIT_SLICES - 1), builder)
    assert late.done()
    never = SlowFuture(mask_builder.MAX_WAIT_SLICES)
    with pytest.raises(Internal, match="grammar masks were not built within 5 s"):
        mask_builder.wait(never, builder)
    assert never.waited_s == pytest.approx(mask_builder.MAX_WAIT_S)
    assert builder.is_hung
    tiny.end_epoch()


class RacingCounter:
    """Counter of a gate that another thread opens right before the counter's first write."""

    def __init__(self, gate: StreamGate) -> None:
        self.gate, self.value = gate, -1

    def __setitem__(self, _: int, value: np.int32) -> None:
        if not self.gate._is_open:
            self.gate.open_permanently()
        self.value = int(value)


def test_a_gate_opened_during_an_advance_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device's stream would wait forever for later masks, which are never built."""
    here = SimpleNamespace(Stream=object, Event=object)
    zeros = lambda count, *, dtype, pin_memory: torch.zeros(count, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(stream_gate, "torch", SimpleNamespace(zeros=zeros, int32=torch.int32, cuda=here))
    gate = StreamGate()
    gate._number = number = RacingCounter(gate)  # type: ignore[assignment]
    gate.advance_to(1)
    assert number.value > stream_gate.FAR_AHEAD


class FakeGrammar(str):
    """The part of a grammar that the pool uses."""

    num_bytes = 0


class BlockingBackend:
    """Backend whose compile() blocks until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def compile(self, constraint: pb.StructuredOutput) -> FakeGrammar:
        if constraint.regex == "hang":
            self.let_go.wait(60)
        return FakeGrammar(constraint.regex)


def test_the_vocabulary_is_read_before_the_first_grammar() -> None:
    """Reading it holds the GIL, which stalls every stream: 60 ms for 4,096 tokens."""
    backend, opened = BlockingBackend(), threading.Event()

    def open_backend() -> BlockingBackend:
        opened.set()
        return backend

    pool = CompilePool(open_backend)  # type: ignore[arg-type]
    pool.open_backend_early()
    assert opened.wait(60)
    assert pool.backend is backend


def test_a_hanging_compilation_is_abandoned_and_others_run() -> None:
    backend = BlockingBackend()
    limits = CompilePoolLimits(num_threads=1, max_wall_s=3)  # the limit applies to the successful compilation as well
    pool = CompilePool(lambda: backend, limits=limits)  # type: ignore[arg-type, return-value]
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


def test_an_abandoned_thread_that_finishes_exits() -> None:
    """Otherwise each slow grammar would leave one more thread and subprocess."""
    before, backend = {*threading.enumerate()}, BlockingBackend()
    limits = CompilePoolLimits(num_threads=1, max_wall_s=0.05)
    pool = CompilePool(lambda: backend, limits=limits)  # type: ignore[arg-type, return-value]
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


def test_the_compile_limit_counts_cpu_time() -> None:
    """A library's subprocess on a busy machine has a CPU limit of its own."""
    looks: list[threading.Thread] = []
    backend = BlockingBackend()

    def look(call: ObservedCall) -> None:
        if isinstance(call.arguments["self"], threading.Timer):
            looks.append(call.arguments["self"])
        if len(looks) == 4:
            backend.let_go.set()

    pool = CompilePool(lambda: backend, limits=CompilePoolLimits(max_cpu_s=0.05))  # type: ignore[arg-type, return-value]
    assert pool.backend is backend
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    with calls_of(threading.Timer.start, on_call=look):
        pool.prepare(b"hang", pb.StructuredOutput(regex="hang"), outcomes.put)
        assert outcomes.get(timeout=60).error is None
    assert len(looks) >= 4


class Panic(BaseException):
    """A panic of a Rust library, which is not an Exception."""


def test_a_panic_of_a_library_is_reported() -> None:
    """The request fails at once, and the thread continues."""

    class Panicking:
        def compile(self, _: pb.StructuredOutput) -> None:
            raise Panic("index out of limits")

    pool = CompilePool(Panicking)  # type: ignore[arg-type]
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    pool.prepare(b"x", pb.StructuredOutput(regex="x"), outcomes.put)
    error = outcomes.get(timeout=60).error
    assert isinstance(error, Internal)
    assert error.message == "structured_output: Panic while compiling"


def test_grammars_stay_while_used_and_then_until_evicted() -> None:
    pool = CompilePool(BlockingBackend, limits=CompilePoolLimits(max_unused=2))  # type: ignore[arg-type]
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
    pool.release(names[0])  # prepared twice
    assert [pool.grammar(name) is not None for name in names] == [True, False, False, False, True]


@pytest.mark.parametrize("multiple", [2, 5, 0.01, 60, 100, 1000])
def test_supported_multiples_can_be_followed(multiple: float) -> None:
    backend = LLGuidanceBackend(TINY, 4096, [0])
    schema = f'{{"type": "number", "multipleOf": {multiple}, "minimum": 1, "maximum": 1000000}}'
    matcher = backend.compile(pb.StructuredOutput(json_schema=schema)).new_matcher()
    filler, mask = backend.filler(), np.zeros((1, 128), dtype=np.int32)
    for digit in Tokenizer.from_file(str(Path(TINY) / "tokenizer.json")).encode("6000").ids:
        filler.fill([matcher], [0], mask)
        assert matcher.fault == ""
        assert matcher.accept([digit]) == 1
    assert matcher.can_end
