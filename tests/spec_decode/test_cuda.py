"""Drafts do not change the text on a GPU."""

from __future__ import annotations

import pytest

from quire.services.worker.replica.replica import Replica
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

pytestmark = pytest.mark.gpu


def texts(replica: Replica, temperature: float) -> tuple[list[list[int]], int]:
    """Returns the texts and the number of accepted drafts."""
    pair = Pair(replica)
    answers = [pair.ask(prompt, 40, temperature=temperature, seed=7) for prompt in questions()]
    pair.run()
    return [answer.tokens for answer in answers], pair.core.speculation.counts.accepted_tokens


@pytest.fixture(scope="module")
def expected() -> dict[float, list[list[int]]]:
    plain = build(device="cuda")
    return {temperature: texts(plain, temperature)[0] for temperature in (0.0, 0.8)}


@pytest.mark.parametrize("method", METHODS)
def test_the_same_text_on_a_gpu(method: str, expected: dict[float, list[list[int]]]) -> None:
    drafting = build(METHODS[method], device="cuda")
    for temperature, wanted in expected.items():
        found, accepted = texts(drafting, temperature)
        assert found == wanted
        assert accepted > 20
