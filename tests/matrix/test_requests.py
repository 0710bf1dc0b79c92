"""Every pair of things that a request may ask for: both are heeded, or the request is refused by name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import quire.kernels.cpu
from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import InvalidArgument
from tests.matrix.features import BASE, REQUESTS, are_ways_of_one, params, refused_field
from tests.matrix.requesting import Answer, ask_now, prompts, question, result_of

PAIRS = [pair for pair in itertools.combinations(REQUESTS, 2) if not are_ways_of_one(*pair)]
REFUSED = [pair for pair in PAIRS if refused_field(*pair) is not None]
HEEDED = [(name,) for name in REQUESTS] + [pair for pair in PAIRS if pair not in REFUSED]
EXACT = quire.kernels.cpu.unavailable() is None  # plain torch rounds otherwise in other batches
SHORT = 20  # tokens of an answer that may have nothing to change
PAGE = Path(__file__).parents[2] / "docs" / "serving" / "sampling.md"

Answers = dict[tuple[str, ...], Answer]


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> Answers:
    """Of all pairs and of each feature alone, in one crowd."""
    prompt = prompts(cluster)[0]
    names: list[tuple[str, ...]] = [*((name,) for name in REQUESTS), *PAIRS]
    return ask_now(cluster, {asked: question(prompt, *asked) for asked in names})


@pytest.mark.parametrize("names", HEEDED, ids=map("-".join, HEEDED))
def test_all_that_is_asked_for_is_heeded(answers: Answers, names: tuple[str, ...]) -> None:
    result = result_of(answers[names])
    assert result.finished
    for name in names:
        for sample in result.outputs:
            REQUESTS[name].check(sample, result, params(*names))


@pytest.mark.skipif(not EXACT, reason="plain torch rounds otherwise in other batches")
@pytest.mark.parametrize(("one", "other"), HEEDED[len(REQUESTS) :])
def test_features_that_observe_change_nothing_and_others_do(answers: Answers, one: str, other: str) -> None:
    together = result_of(answers[one, other])
    for feature, beside in ((one, other), (other, one)):
        alone = result_of(answers[beside,])
        # Of three samples, the first is that of a request for one.
        same = all(
            ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
            for ours, theirs in zip(together.outputs, alone.outputs, strict=False)
        )
        if REQUESTS[feature].observes:
            assert same, f"{feature} changes what {beside} says"
        if REQUESTS[feature].moves and len(alone.outputs[0].token_ids) > SHORT:
            assert not same, f"{feature} is without effect beside {beside}"


@pytest.mark.parametrize(("one", "other"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(answers: Answers, one: str, other: str) -> None:
    answer = answers[one, other]
    assert isinstance(answer, InvalidArgument)
    assert str(refused_field(one, other)) in answer.message


def listed() -> set[tuple[str, str]]:
    """Fields that the page says are refused together, the second by its name."""
    section = PAGE.read_text(encoding="utf-8").partition("## Refused together")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {(cells[0].split("`")[1], field) for cells in rows for field in re.findall("`([a-z_]+)`", cells[1])}


def test_the_page_lists_what_is_refused() -> None:
    refused = set()
    for one, other in REFUSED:
        named = str(refused_field(one, other))
        beside = one if named in REQUESTS[other].asks else other
        refused.add((next(iter(REQUESTS[beside].asks)), named))
    assert refused <= listed()


def test_what_the_page_lists_is_refused(client: Client) -> None:
    values = {field: value for feature in REQUESTS.values() for field, value in feature.asks.items()}
    values["logits_processors"] = {"of_a_package": {}}  # none is installed here
    assert listed()
    for one, other in listed():
        both = SamplingParams(**{**BASE, one: values[one], other: values[other]})
        with pytest.raises(InvalidArgument, match=f"^{other} "):
            client.generate("x", both)
