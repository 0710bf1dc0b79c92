"""Drafts are accepted as often as expected. Wrong KV, a missed token or a stale feature would not change the text,
which is verified, but lowers the acceptance rate."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from quire import bundled
from quire.services.worker.replica.replica import Replica
from quire.shared.errors import InvalidArgument
from tests.services.scheduler.conftest import UnlimitedForecast
from tests.spec_decode.methods import DRAFTERS, METHODS, TREES
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions
from tools.training.tokenizer import load_tokenizer

LEAST = {
    "draft_model": 0.85,
    "eagle": 0.8,
    "medusa": 0.3,
}  # minimum acceptance rates on questions that quire-tiny can answer


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=LEAST)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def replica(method: str) -> Replica:
    return build(METHODS[method])


def counting(first: int) -> list[int]:
    """Returns a prompt with a long, predictable continuation."""
    ids: list[int] = load_tokenizer(bundled.FOLDER).encode(" ".join(map(str, range(first, first + 30)))).ids
    return ids


def rate(pair: Pair) -> float:
    counts = pair.core.speculation.counts
    assert counts.draft_tokens > 100
    return counts.accepted_tokens / counts.draft_tokens


def ask_all(pair: Pair, **sampling: Any) -> None:
    for prompt in questions():
        pair.ask(prompt, 40, **sampling)


def test_most_drafts_are_accepted(replica: Replica, method: str) -> None:
    pair = Pair(replica)
    ask_all(pair)
    pair.run()
    assert rate(pair) > LEAST[method]


def test_drafts_of_sampled_tokens_are_accepted(replica: Replica, method: str) -> None:
    """Stories have many possible beginnings; drafts drawn with the same noise follow the same story."""
    pair = Pair(replica)
    for seed in range(6):
        pair.ask(questions()[-1], 60, temperature=1.0, seed=seed)
    pair.run()
    assert len({tuple(answer.tokens) for answer in pair.answers}) == 6
    assert rate(pair) > 0.75 * LEAST[method]


def test_drafters_process_chunked_and_cached_prompts(replica: Replica, method: str) -> None:
    pair = Pair(replica, max_num_batched_tokens=64)
    ask_all(pair)
    pair.run()
    assert rate(pair) > LEAST[method]
    before = pair.core.speculation.counts.draft_tokens, pair.core.speculation.counts.accepted_tokens
    ask_all(pair)
    pair.run()
    assert pair.core.counts.cached_tokens > 800
    counts = pair.core.speculation.counts
    assert (counts.accepted_tokens - before[1]) / (counts.draft_tokens - before[0]) > LEAST[method]


def test_acceptance_survives_preemption(replica: Replica, method: str) -> None:
    pair = Pair(replica, num_blocks=84)
    pair.core.state.forecast = UnlimitedForecast()
    for prompt in questions():
        pair.ask(prompt, 60, eos=())
    pair.run()
    assert pair.core.counts.preemptions > 0
    assert rate(pair) > 0.6 * LEAST[method]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_trees_accept_more_than_chains(name: str, sampling: dict[str, Any]) -> None:
    """Uses trees as deep as the chain with second likeliest tokens as siblings. Wrong KV of a moved draft would show
    here as well as in the text."""
    means = []
    for config in (METHODS[str(TREES[name]["method"])], TREES[name]):
        pair = Pair(build(config))
        for _ in range(2):
            ask_all(pair, **sampling)
        pair.run()
        counts = pair.core.speculation.counts
        means.append(counts.accepted_tokens / counts.drafts)
    assert means[1] > 1.005 * means[0]


def test_a_draft_model_catches_up_on_unseen_tokens() -> None:
    """Steps without drafts leave its KV incomplete; with a smaller budget it catches up in several steps."""
    replica = build(METHODS["draft_model"], max_num_batched_tokens=64, max_num_seqs=8)
    pair = Pair(replica)
    pair.core.speculation.lengths.choose = lambda *numbers: 0  # type: ignore[method-assign]
    for first in range(1, 7):
        pair.ask(counting(first), 150, eos=())
    for _ in range(60):
        pair.plan()
        pair.result()
    pair.core.speculation.lengths.choose = lambda *numbers: 4  # type: ignore[method-assign]
    pair.run()
    assert rate(pair) > 0.7


def test_an_eagle_head_drafts_for_sequences_admitted_without_drafts() -> None:
    """Their prompts were computed in steps without drafts."""
    pair = Pair(build(METHODS["eagle"], max_num_seqs=8))
    pair.core.speculation.lengths.choose = lambda *numbers: 0  # type: ignore[method-assign]
    pair.ask(counting(1), 30, eos=())
    for first in range(2, 8):
        pair.plan()
        pair.result()
        pair.ask(counting(first), 80, eos=())
    for _ in range(12):
        pair.plan()
        pair.result()
    assert pair.core.speculation.counts.draft_tokens == 0
    pair.core.speculation.lengths.choose = lambda *numbers: 4  # type: ignore[method-assign]
    pair.run()
    assert rate(pair) > 0.5


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_likeliest_tokens_as_drafts(rule: str) -> None:
    config = METHODS["eagle"] | {"draft_sample_method": "greedy", "rejection_sample_method": rule}
    pair = Pair(build(config))
    ask_all(pair, temperature=0.5, seed=3)
    pair.run()
    assert rate(pair) > 0.6


def test_the_rejection_rule_accepts_by_probability() -> None:
    pair = Pair(build(METHODS["draft_model"] | {"rejection_sample_method": "standard"}))
    ask_all(pair, temperature=0.7, seed=3, top_p=0.9)
    pair.run()
    assert rate(pair) > 0.7


@pytest.mark.slow
def test_the_rejection_rule_preserves_the_models_distribution() -> None:
    """Samples the second token of a story, after a draft of the first."""
    prompt, shares = questions()[-1], []
    for config in (None, METHODS["draft_model"] | {"rejection_sample_method": "standard"}):
        pair = Pair(build(config, max_num_seqs=64))
        for seed in range(1500):
            pair.ask(prompt, 2, temperature=1.5, seed=seed, eos=())
        pair.run()
        second = np.array([answer.tokens[1] for answer in pair.answers])
        shares.append(np.bincount(second, minlength=4096) / len(second))
    assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.1
    assert shares[0].max() < 0.7


def test_another_vocabulary_is_refused(tmp_path: Any) -> None:
    folder = shutil.copytree(DRAFTERS / "draft", tmp_path / "draft")
    values = json.loads((folder / "config.json").read_text()) | {"vocab_size": 4000}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match="a vocabulary of 4000 tokens, the model one of 4096"):
        build(METHODS["draft_model"] | {"model": str(folder)})
