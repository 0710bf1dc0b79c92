"""Partly shared blocks that are copied or extended: texts equal those computed from scratch, and drafters keep the
prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.services.worker.replica.replica import Replica
from tests.services.scheduler.conftest import UnlimitedForecast
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

SIZE = 64
TURNS = 3


@pytest.fixture(scope="module", params=[None, *METHODS])
def replica(request: pytest.FixtureRequest) -> Replica:
    torch.set_num_threads(1)
    return build(METHODS.get(request.param), block_size=SIZE, num_blocks=200)


def talk(pair: Pair, **sampling: Any) -> list[list[int]]:
    """Runs conversations together, each turn requested twice at once, and returns the outputs."""
    texts = [list(prompt) for prompt in questions(per_skill=1)]
    said: list[list[int]] = []
    for _ in range(TURNS):
        answers = [pair.ask(text, 30, eos=(), **sampling) for text in [*texts, *texts]]
        pair.run()
        said += [answer.tokens for answer in answers]
        ends = [answer.tokens for answer in answers[: len(texts)]]
        texts = [[*text, *end, *text[:19]] for text, end in zip(texts, ends, strict=True)]
    assert pair.core.use.used == 0
    return said


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "seed": 4}])
def test_the_same_texts_with_little_recomputation(replica: Replica, sampling: dict[str, Any]) -> None:
    expected = talk(Pair(replica, enable_prefix_caching=False), **sampling)
    whole = Pair(replica, prefix_grain=0)
    assert talk(whole, **sampling) == expected
    parts = Pair(replica, max_num_batched_tokens=100)
    assert talk(parts, **sampling) == expected
    num_prompt_tokens = parts.core.counts.prompt_tokens
    assert num_prompt_tokens == whole.core.counts.prompt_tokens
    assert parts.core.counts.cached_tokens > whole.core.counts.cached_tokens + 0.1 * num_prompt_tokens
    accepted = [pair.core.speculation.counts.accepted_tokens for pair in (whole, parts)]
    assert accepted[1] >= 0.9 * accepted[0], "drafters lost the prefix"


def test_preempted_sequences_generate_the_same(replica: Replica) -> None:
    expected = talk(Pair(replica, enable_prefix_caching=False))
    tight = Pair(replica, num_blocks=14)
    tight.core.state.forecast = UnlimitedForecast()
    assert talk(tight) == expected
    assert tight.core.counts.preemptions > 0
    assert tight.core.counts.resumed_cached_tokens > 0
