"""Beam searches on a core: the sequences of an exhaustive search, shared blocks, and all resources released."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.beam_search import BeamRules, BeamSearchState
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, WorkerLoss
from quire.services.scheduler.values.payload import Payload
from tests.services.scheduler.conftest import make_sequence
from tests.services.scheduler.core.prerequisites.test_siblings import PROMPT, Run
from tests.services.scheduler.reference_worker import EOS, candidates, oracle

NewCore = Callable[..., Core]


def search(
    key: int, prompt: list[int], width: int = 3, outputs: int = 0, max_tokens: int = 12, **fields: Any
) -> Sequence:
    rules = {name: fields.pop(name) for name in ("length_penalty", "early_stopping") if name in fields}
    eos = (EOS,) if fields.pop("eos", True) else ()
    stops = fields.pop("stops", ())
    made = [
        make_sequence(key + i, prompt, max_tokens, eos_token_ids=eos, stop_token_ids=stops, **fields)
        for i in range(outputs or width)
    ]
    root = made[0]
    search = BeamSearchState(BeamRules(width, outputs or width, max_tokens, frozenset((*eos, *stops)), **rules))
    root.payload = Payload(b"", num_logprobs=search.rules.num_candidates)
    root.search, root.outputs = search, made
    return root


def exhaustive(prompt: list[int], rules: BeamRules) -> list[tuple[list[int], float, Reason]]:
    """Searches as the protocol defines it, to the maximum length (or until enough beams have ended, with early
    stopping)."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int], Reason]] = []
    for length in range(1, rules.max_output_tokens + 1):
        following = []
        for total, said in live:
            for token, logprob in zip(*candidates(prompt + said, rules.num_candidates), strict=True):
                if token in rules.end_token_ids:
                    done.append(((total + logprob) / length**rules.length_penalty, [*said, token], Reason.STOP))
                else:
                    following.append((total + logprob, [*said, token]))
        live = heapq.nlargest(rules.width, following, key=lambda beam: beam[0])
        if rules.early_stopping and len(done) >= rules.width:
            live = []
            break
    done += [(total / len(said) ** rules.length_penalty, said, Reason.LENGTH) for total, said in live]
    best = sorted(done, key=lambda end: -end[0])[: rules.num_outputs]
    return [(said, score, reason) for score, said, reason in best]


class BeamRun(Run):
    """Also collects the results of searches."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.scores: dict[int, float | None] = {}
        self.failures: dict[int, Failure | None] = {}

    def collect(self) -> None:
        events = self.core.take_events()
        for columns in events.tokens:
            counts = (
                columns.token_counts.tolist() if columns.token_counts is not None else [1] * len(columns.sequence_ids)
            )
            tokens = iter(columns.token_ids.tolist())
            for stream, count in zip(columns.sequence_ids.tolist(), counts, strict=True):
                self.tokens.setdefault(stream, []).extend(next(tokens) for _ in range(count))
        for finished in events.finished:
            stream = finished.sequence.sequence_id
            assert stream not in self.ended, "one terminal event"
            self.ended[stream] = finished.reason
            self.scores[stream] = finished.score
            self.failures[stream] = finished.failure

    def step(self) -> dict[int, int]:
        plan = self.plan()
        self.core.apply(self.worker.execute(plan), 0)
        self.collect()
        return {}

    def check(self, root: Sequence, prompt: list[int]) -> None:
        assert root.search is not None
        expected = exhaustive(prompt, root.search.rules)
        for output, (said, score, reason) in zip(root.outputs, expected, strict=True):
            assert self.tokens[output.sequence_id] == said
            assert self.scores[output.sequence_id] == pytest.approx(score, abs=1e-4)
            assert self.ended[output.sequence_id] is reason
        assert not self.core.state.searches.by_root
        assert self.core.use.used == self.core.kv.num_unowned() == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "rules", [{}, {"length_penalty": 2.0}, {"length_penalty": -1.0}, {"length_penalty": 0.0}, {"early_stopping": True}]
)
@pytest.mark.parametrize(("width", "outputs"), [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_beam_search_finds_the_sequences_of_an_exhaustive_search(
    core: NewCore, width: int, outputs: int, rules: dict[str, Any], caching: bool
) -> None:
    for seed in range(6):
        prompt = [seed, *range(3 + 7 * seed)]
        run = BeamRun(core(block_size=4, enable_prefix_caching=caching))
        root = search(0, prompt, width, outputs, **rules)
        run.core.add(root)
        run.drain()
        run.check(root, prompt)


def test_stop_tokens_end_beams_and_are_reported(core: NewCore) -> None:
    run = BeamRun(core(block_size=4))
    root = search(0, PROMPT, 4, 4, stops=tuple(range(20, 40)), eos=False)
    run.core.add(root)
    run.drain()
    run.check(root, PROMPT)
    assert Reason.STOP in run.ended.values()


def test_beams_share_the_blocks_of_their_common_prefix(core: NewCore) -> None:
    run = BeamRun(core(block_size=4))
    root = search(0, PROMPT[:38], 4, 4, eos=False, max_tokens=9)
    run.core.add(root)
    most = 0
    while run.core.has_work:
        run.step()
        most = max(most, run.core.use.used)
    run.check(root, PROMPT[:38])
    assert most <= 9 + 4 * 4, "the prompt's full blocks once"
    assert run.worker.num_computed_tokens <= 38 + 4 * 8, "each token of a beam once, and the prompt once"


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_beam_searches_run_among_other_sequences(core: NewCore, in_flight: int) -> None:
    run = BeamRun(
        core(block_size=4, max_steps_in_flight=in_flight, max_num_batched_tokens=20, enable_prefix_caching=True)
    )
    roots = [search(100 * i, PROMPT[i:], 3) for i in range(3)]
    run.core.add(make_sequence(7, [1, 2, 3], 30))
    for root in roots:
        run.core.add(root)
    run.core.add(make_sequence(8, [4, 5, 6], 30))
    run.drain()
    for i, root in enumerate(roots):
        run.check(root, PROMPT[i:])
    assert run.tokens[7] == oracle([1, 2, 3], 33, eos=False)
    assert run.tokens[8] == oracle([4, 5, 6], 33, eos=False)


def test_a_preempted_search_resumes_where_it_was(core: NewCore) -> None:
    for at in range(1, 12):
        run = BeamRun(core(block_size=4, enable_prefix_caching=at % 2 == 0))
        root = search(0, PROMPT, 3)
        run.core.add(root)
        for _ in range(at):
            if run.core.has_work:
                run.step()
        if run.core.state.searches.by_root:
            run.core.preempt(run.core.state.searches.slots_of(root)[-1])
            assert not run.core.running.live.any()
        run.drain()
        run.check(root, PROMPT)


def test_a_search_continues_on_another_worker(core: NewCore) -> None:
    for at in range(1, 10):
        first, second = (BeamRun(core(block_size=4, max_num_batched_tokens=16)) for _ in range(2))
        root = search(0, PROMPT, 3)
        first.core.add(root)
        for _ in range(at):
            first.step()
        (moved,) = first.core.evacuate(WorkerLoss("w", 1))
        assert moved is root
        assert not first.core.has_work
        second.core.add(root)
        second.drain()
        second.check(root, PROMPT)


def test_blocks_run_out(core: NewCore) -> None:
    run = BeamRun(core(block_size=4, num_blocks=34))
    roots = [search(100 * i, PROMPT[i : i + 20], 3) for i in range(3)]
    for root in roots:
        run.core.add(root)
    for key in range(5):
        run.core.add(make_sequence(key + 10, [key, 1, 2], 20, block_size=4))
    run.drain()
    for i, root in enumerate(roots):
        run.check(root, PROMPT[i : i + 20])
    assert run.core.counts.preemptions


def test_a_search_that_can_never_fit_fails(core: NewCore) -> None:
    run = BeamRun(core(block_size=4, num_blocks=13))
    run.core.add(search(0, PROMPT, 4))
    run.core.add(make_sequence(10, [1], 2, block_size=4))
    while (plan := run.core.schedule(0)) is not None:
        run.core.apply(run.worker.execute(plan), 0)
    run.collect()
    assert run.ended.pop(10) is Reason.LENGTH, "the next waiting sequence is admitted"
    assert set(run.ended.values()) == {Reason.ERROR}
    assert len(run.ended) == 4
    assert {failure.code for failure in run.failures.values() if failure} == {"RESOURCE_EXHAUSTED"}
    assert run.core.use.used == 0


def test_more_beams_than_slots_are_refused(core: NewCore) -> None:
    run = BeamRun(core(max_num_seqs=4))
    run.core.add(search(0, PROMPT, 5))
    run.collect()
    assert set(run.ended.values()) == {Reason.ERROR}
    assert "5 beams are more than the 4 slots" in str(run.failures[0])


def test_slots_are_reserved_for_beams(core: NewCore) -> None:
    run = BeamRun(core(max_num_seqs=4, block_size=4))
    root = search(0, PROMPT, 3)
    run.core.add(root)
    for key in (10, 11, 12):
        run.core.add(make_sequence(key, [key], 30, block_size=4))
    run.step()
    assert len(run.core.running) == 2, "its prompt, and one other"
    run.drain()
    run.check(root, PROMPT)


@pytest.mark.parametrize("at", range(1, 6))
def test_cancelling_one_cancels_all_and_frees_everything(core: NewCore, at: int) -> None:
    run = BeamRun(core(block_size=4, max_steps_in_flight=2))
    root = search(0, PROMPT, 3)
    run.core.add(root)
    for _ in range(at):
        run.step()
    run.core.cancel(root.key)
    run.collect()
    run.drain()
    while run.core.steps_in_flight:
        run.core.apply(run.worker.execute(run.plan()), 0)
    assert run.ended == dict.fromkeys(range(3), Reason.CANCELLED)
    assert run.core.use.used == 0
    assert run.core.running.num_free_slots == 16


def test_missing_results_end_with_an_error(core: NewCore) -> None:
    """All tokens but three are banned."""
    run = BeamRun(core())
    root = search(0, [1], 8, max_tokens=1)
    run.core.add(root)
    plan = run.plan()
    result = run.worker.execute(plan)
    assert result.logprobs is not None
    result.logprobs.logprobs[4:] = float("-inf")
    run.core.apply(result, 0)
    run.collect()
    assert sorted(run.ended.values(), key=str) == [Reason.ERROR] * 5 + [Reason.LENGTH] * 3


def test_a_worker_that_fails_a_beam_ends_the_search(core: NewCore) -> None:
    run = BeamRun(core())
    root = search(0, PROMPT, 2)
    run.core.add(root)
    run.step()
    result = run.worker.execute(run.plan())
    result.failures.append((run.core.state.searches.slots_of(root)[0], Failure("INTERNAL", "NaN")))
    result = type(result)(result.step_id, result.token_ids, failures=result.failures, logprobs=None)
    run.core.apply(result, 0)
    run.collect()
    assert run.ended == dict.fromkeys(range(2), Reason.ERROR)
    assert run.core.use.used == 0
