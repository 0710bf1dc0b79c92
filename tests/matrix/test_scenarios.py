"""Answers do not depend on the scenario: tokens, text, log-probabilities, finish reasons. In every group of scenarios
all features are requested at once, during the disturbances and again with the prompts cached."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

import quire.kernels.cpu
from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.requests import Prompt
from tests.e2e.conftest import running_cluster
from tests.matrix.disturbance import Disturbance
from tests.matrix.features import REQUESTS
from tests.matrix.requesting import Answer, Question, ask_all, ask_now, assert_same, picture_prompt, prompts, question
from tests.matrix.scenarios import SCENARIOS, SMALL_STEP, Scenario, ScenarioGroup, crowds, pairs
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(
    quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches"
)

CROWDS = crowds(list(SCENARIOS), size=8)
PATIENCE_S = 60.0

EVERYTHING = ("filters", "penalties", "bans", "min_tokens", "bias", "allowed", "stops", "repetition")
TOLD = ("logprobs", "prompt_logprobs", "n")
TOGETHER: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in REQUESTS if name != "cold"},
    "everything": (*EVERYTHING, *TOLD),
    "everything in a form": ("json_schema", "penalties", "bias", "filters", *TOLD),
    "everything behind reasoning": ("structural_tag", "thinking", "penalties", *TOLD, "flat_logprobs"),
    "everything with beams": ("beams", "bias", "allowed", "min_tokens", "logprobs"),
}
Names = tuple[str, int]


def questions(prompts: Sequence[Prompt], group: ScenarioGroup, *also: str) -> dict[Names, Question]:
    """Combinations of features, each for one prompt, the larger ones for all that the model takes."""
    prompts = prompts if group.takes_pictures else [prompt for prompt in prompts if not isinstance(prompt, dict)]
    asked = [(name, i) for name in TOGETHER for i in range(1 if name in REQUESTS else len(prompts))]
    return {
        (name, i): question(prompts[i], *TOGETHER[name], *also, options=group.options(number))
        for number, (name, i) in enumerate(asked)
    }


@pytest.fixture(scope="module")
def asked(cluster: Cluster) -> list[Prompt]:
    """Prompts of text, and one with a picture."""
    found = prompts(cluster)
    assert min(map(len, found)) > SMALL_STEP
    return [*found, picture_prompt(cluster)]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, asked: list[Prompt]) -> dict[Names, Answer]:
    return ask_now(cluster, questions(asked, ScenarioGroup([]), "cold"))


def test_every_pair_is_together_in_a_crowd() -> None:
    found = {frozenset(pair) for crowd in CROWDS for pair in itertools.combinations(crowd, 2)}
    assert found == pairs(list(SCENARIOS))


def test_every_feature_is_asked_for() -> None:
    assert {name for names in TOGETHER.values() for name in names} | {"cold"} == set(REQUESTS)


@pytest.mark.parametrize("crowd", CROWDS, ids=[" + ".join(crowd) for crowd in CROWDS])
@pytest.mark.slow
def test_nothing_around_a_request_changes_its_answer(
    asked: list[Prompt], undisturbed: dict[Names, Answer], crowd: tuple[str, ...], tmp_path: Path
) -> None:
    group = ScenarioGroup([SCENARIOS[name] for name in crowd])
    with running_cluster(**group.cluster(tmp_path)) as cluster:
        asyncio.run(_live_through(cluster, crowd, questions(asked, group), undisturbed))


async def _live_through(
    cluster: Cluster, crowd: tuple[str, ...], questions: dict[Names, Question], undisturbed: dict[Names, Answer]
) -> None:
    disturbance = Disturbance(cluster)
    client = AsyncClient(cluster.grpc_address)
    disturbing = asyncio.ensure_future(_disturb(disturbance, crowd))
    num_rounds = 0
    while num_rounds < 2 or not disturbing.done():
        for name, answer in (await ask_all(client, questions)).items():
            assert_same(answer, undisturbed[name], str(name))
        num_rounds += 1
    await client.close()
    await disturbing
    assert [name for name in crowd if not await SCENARIOS[name].occurred(disturbance)] == []
    await eventually(
        disturbance.schedulers,
        lambda found: not any(totals["quire_scheduler_blocks_unowned"] for totals in found.values()),
    )


async def _disturb(disturbance: Disturbance, crowd: tuple[str, ...]) -> None:
    """Runs the disturbances one after the other, and those that run concurrently with all."""
    done, around = asyncio.Event(), [SCENARIOS[name] for name in crowd]
    async with asyncio.TaskGroup() as group:
        for each in around:
            if each.beside is not None:
                group.create_task(_beside(each, disturbance, done))
        for each in around:
            if each.disturb is not None:
                await each.disturb(disturbance)
        done.set()


async def _beside(scenario: Scenario, disturbance: Disturbance, done: asyncio.Event) -> None:
    assert scenario.beside is not None
    await scenario.beside(disturbance, done)
