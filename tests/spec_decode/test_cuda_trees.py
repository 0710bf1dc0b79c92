"""Draft trees do not change the text on a GPU: kernel by kernel, in CUDA graphs, in any batch."""

from __future__ import annotations

from typing import Any

import pytest

from quire.services.worker.graphs.chunk_graphs import ChunkGraphs
from quire.services.worker.replica.replica import Replica
from tests.observing import calls_of
from tests.services.worker.replica_internals import chunk_graphs_of, runner_of
from tests.spec_decode.methods import TREES
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions
from tests.spec_decode.test_same_text import ask_all, check_preempted, expected_of, texts

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "reference": {"attention_backend": "reference", "cuda_graphs": False},
    "eager": {"cuda_graphs": False},
    "graphs of decodes": {"cuda_graph_chunks": False},
    "graphs": {},
    "blocks of 16": {"block_size": 16},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 7},
    "filtered": {"temperature": 1.1, "seed": 5, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.4},
}
RIGHT = 0.05  # tolerance of the acceptance rate relative to the CPU, whose last bits differ


def said_by(replica: Replica, **sampling: Any) -> tuple[Pair, list[list[int]]]:
    pair = Pair(replica)
    answers = ask_all(pair, **sampling)
    pair.run()
    return pair, texts(answers)


@pytest.fixture(scope="module")
def plain() -> Replica:
    return build(device="cuda")


@pytest.fixture(scope="module", params=TREES)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drafting(method: str) -> Replica:
    return build(TREES[method], device="cuda")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_text_in_every_way(plain: Replica, method: str, way: str) -> None:
    replica = build(TREES[method], device="cuda", **WAYS[way])
    for sampling in SAMPLING.values():
        pair, found = said_by(replica, **sampling)
        assert found == said_by(plain, **sampling)[1]
        assert pair.core.speculation.counts.accepted_tokens > 20
        assert pair.core.use.used == 0


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_same_text_in_batches_of_any_size(plain: Replica, drafting: Replica, at_once: int) -> None:
    found = []
    for replica in (drafting, plain):
        pair = Pair(replica)
        for first in range(0, 6, at_once):
            for prompt in questions()[first : first + at_once]:
                pair.ask(prompt, 40)
            pair.run()
        found.append(texts(pair.answers))
    assert found[0] == found[1]


def test_steps_with_trees_go_through_graphs(drafting: Replica) -> None:
    """Every step with drafts must run in a graph."""
    assert chunk_graphs_of(drafting).count > 0
    launch = type(runner_of(drafting)).launch
    with calls_of(ChunkGraphs.prepare, launch) as calls:
        said_by(drafting)
    steps = [(call.name, call.arguments["inputs"]) for call in calls]
    with_trees = [(name, inputs.number) for name, inputs in steps if inputs.tree_mask is not None]
    recorded = [number for name, number in with_trees if name == "prepare"]
    launched = [number for name, number in with_trees if name == "launch"]
    assert recorded == launched
    assert len(launched) > 5


def test_the_acceptance_rate_equals_that_of_the_cpu(drafting: Replica, method: str) -> None:
    """A wrong mask, position or KV move that only spoils drafts would not change the text."""
    counts = [said_by(replica)[0].core.speculation.counts for replica in (drafting, build(TREES[method]))]
    rates = [found.accepted_tokens / found.drafts for found in counts]
    assert rates[0] == pytest.approx(rates[1], rel=RIGHT)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_same_text_however_many_steps_overlap(plain: Replica, drafting: Replica, in_flight: int) -> None:
    pairs = [Pair(drafting, max_steps_in_flight=in_flight), Pair(plain)]
    answers = [ask_all(pair, temperature=0.6, seed=11) for pair in pairs]
    for pair in pairs:
        pair.run()
    assert texts(answers[0]) == texts(answers[1])


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}], ids=["graphs", "eager"])
def test_preempted_sequences_generate_the_same(plain: Replica, method: str, settings: dict[str, Any]) -> None:
    replica = build(TREES[method], device="cuda", block_size=16, **settings)
    check_preempted(expected_of(plain), replica)


def test_cached_prompts_and_outputs_are_reused(plain: Replica, drafting: Replica) -> None:
    """KV of an accepted path in cached blocks equals that of single steps."""
    prompt, found = (questions()[0] * 20)[:257], []
    for replica in (drafting, plain):
        pair = Pair(replica)
        first = pair.ask(prompt, 150, eos=())
        pair.run()
        again = pair.ask(prompt, 60, eos=())
        after = pair.ask([*prompt, *first.tokens], 60, eos=())
        pair.run()
        assert pair.core.counts.cached_tokens > 2 * 256
        assert again.tokens == first.tokens[:60]
        found.append(texts([first, again, after]))
    assert found[0] == found[1]


def test_a_sequence_migrates_to_a_worker_without_drafts_and_back(plain: Replica, drafting: Replica) -> None:
    _, expected = said_by(plain, temperature=0.7, seed=4)
    pair = Pair(drafting)
    answers = ask_all(pair, temperature=0.7, seed=4)
    for number, replica in enumerate((plain, drafting)):
        for _ in range(12 + number):
            if pair.plan():
                pair.result()
        pair = Pair(replica).with_answers(answers, pair.core.evacuate())
    pair.run()
    assert texts(answers) == expected


def test_8_bit_kv_is_moved_correctly(method: str) -> None:
    found = [said_by(build(config, device="cuda", kv_cache_dtype="fp8")) for config in (TREES[method], None)]
    assert found[0][1] == found[1][1]
    assert found[0][0].core.speculation.counts.accepted_tokens > 20
