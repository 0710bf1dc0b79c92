"""With batch_invariant a request gets bit-identical tokens and log-probabilities under any load."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.kernels import cpu
from quire.services.worker.replica.replica import Replica
from tests.batch_invariance.requests import Given, alone, ask, given, requests
from tests.services.scheduler.conftest import UnlimitedForecast
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build

needs_library = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
WAYS = [
    pytest.param({"dtype": "float32"}, id="float32", marks=needs_library),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16", marks=needs_library),
    pytest.param({"dtype": "float32", "device": "cuda"}, id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param({"dtype": "bfloat16", "device": "cuda"}, id="cuda-bfloat16", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"batch_invariant": True, **request.param}


@pytest.fixture(scope="module")
def replica(way: dict[str, Any]) -> Replica:
    return build(**way)


@pytest.fixture(scope="module")
def expected(replica: Replica) -> list[Given]:
    return alone(replica, requests())


def test_all_at_once(replica: Replica, expected: list[Given]) -> None:
    pair = Pair(replica)
    answers = ask(pair, requests())
    pair.run()
    assert given(answers) == expected
    assert sum(len(logprobs) for _, logprobs in expected) > 100


@pytest.mark.parametrize("seed", range(4))
def test_staggered_arrivals_in_chunks_of_any_size(replica: Replica, expected: list[Given], seed: int) -> None:
    """Runs batches of every size and composition; in the second round prompts are cached."""
    draw = random.Random(seed)
    pair = Pair(
        replica, max_num_batched_tokens=draw.choice([16, 37, 90, 300]), max_steps_in_flight=draw.choice([1, 2, 3])
    )
    order = [*range(len(expected))] * 2
    draw.shuffle(order)
    answers = []
    for index in order:
        answers += ask(pair, [requests()[index]])
        for _ in range(draw.choice([0, 0, 1, 3, 9])):
            if pair.plan():
                pair.result()
    pair.run()
    assert given(answers) == [expected[index] for index in order]
    assert pair.core.counts.cached_tokens > 0


def test_after_a_cached_prefix(replica: Replica, expected: list[Given]) -> None:
    pair = Pair(replica)
    for _ in range(2):
        answers = ask(pair, requests())
        pair.run()
        assert given(answers) == expected
    assert pair.core.counts.cached_tokens > 500


def test_preempted_and_recomputed(replica: Replica) -> None:
    longer = {"max_tokens": 40, "eos": ()}
    few = requests()[::2]
    expected = alone(replica, few, **longer)
    num_tokens = sum(len(prompt) + 40 for prompt, _ in few)
    tight = Pair(replica, num_blocks=num_tokens // 2 // replica.limits.block_size)
    tight.core.state.forecast = UnlimitedForecast()  # admits more sequences than fit
    answers = ask(tight, few, **longer)
    tight.run()
    assert tight.core.counts.preemptions > 0
    assert given(answers) == expected


@pytest.mark.parametrize("method", METHODS)
def test_with_drafts(way: dict[str, Any], expected: list[Given], method: str) -> None:
    pair = Pair(build(METHODS[method], **way))
    answers = ask(pair, requests())
    pair.run()
    assert given(answers) == expected
    assert pair.core.speculation.counts.accepted_tokens > 3


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_any_number_of_threads(dtype: str) -> None:
    replica = build(dtype=dtype, batch_invariant=True)
    expected = alone(replica, requests())
    before = cpu.num_threads()
    try:
        for threads in (2, 5):
            cpu.set_num_threads(threads)
            pair = Pair(replica)
            answers = ask(pair, requests())
            pair.run()
            assert given(answers) == expected
    finally:
        cpu.set_num_threads(before)


@needs_library
def test_processed_log_probabilities() -> None:
    replica = build(dtype="bfloat16", batch_invariant=True, logprobs_mode="processed_logprobs")
    expected = alone(replica, requests())
    pair = Pair(replica, max_num_batched_tokens=50)
    answers = ask(pair, requests())
    pair.run()
    assert given(answers) == expected
