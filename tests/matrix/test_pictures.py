"""Each feature with a prompt that has a picture: it is heeded, in a cluster and in process, and with an adapter."""

from __future__ import annotations

import pytest

import quire.kernels.cpu
from quire import LLMEngine, bundled
from quire.cluster import Cluster
from quire.requests import RequestOptions
from tests.e2e.conftest import running_cluster
from tests.matrix.checks import nothing
from tests.matrix.features import REQUESTS, params
from tests.matrix.requesting import Answer, ask_now, assert_same, picture_prompt, question, result_of

EXACT = quire.kernels.cpu.unavailable() is None
# The prompt in an answer is the placeholder, in place of which there are further tokens.
CHECKED = [name for name in REQUESTS if name not in ("prompt_logprobs", "named_prompt_logprobs")]


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[str, Answer]:
    """Answers of each feature alone, requested at once."""
    prompt = picture_prompt(cluster)
    return ask_now(cluster, {name: question(prompt, name) for name in REQUESTS})


@pytest.mark.parametrize("name", REQUESTS)
def test_a_feature_is_heeded_beside_a_picture(answers: dict[str, Answer], name: str) -> None:
    result = result_of(answers[name])
    assert result.finished
    check = REQUESTS[name].check if name in CHECKED else nothing
    for sample in result.outputs:
        check(sample, result, params(name))


@pytest.mark.parametrize("name", [name for name in REQUESTS if REQUESTS[name].observes])
@pytest.mark.skipif(not EXACT, reason="plain torch rounds otherwise in other batches")
def test_features_that_observe_change_nothing(answers: dict[str, Answer], cluster: Cluster, name: str) -> None:
    """Of three samples, the first is that of a request for one."""
    alone = ask_now(cluster, {"": question(picture_prompt(cluster))})[""]
    assert result_of(answers[name]).outputs[0].token_ids == result_of(alone).outputs[0].token_ids


def test_prompt_logprobs_cover_the_tokens_of_the_picture(answers: dict[str, Answer]) -> None:
    result = result_of(answers["prompt_logprobs"])
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == result.prompt_tokens - 1


@pytest.mark.slow
@pytest.mark.skipif(not EXACT, reason="plain torch rounds otherwise in other batches")
def test_an_engine_in_process_returns_what_a_cluster_returns(cluster: Cluster, answers: dict[str, Answer]) -> None:
    prompt, found = picture_prompt(cluster), {}
    with LLMEngine(num_blocks=2000, threads=1) as made:
        for name in REQUESTS:
            one = question(prompt, name)
            made.add_request(name, one.prompt, one.params)
        while made.has_unfinished_requests():
            found |= {output.request_id: output for output in made.step() if output.finished}
    for name, whole in answers.items():
        assert_same(found[name], whole, name)


@pytest.mark.slow
@pytest.mark.skipif(not EXACT, reason="plain torch rounds otherwise in other batches")
def test_an_adapter_reads_the_same_picture_beside_the_model(cluster: Cluster, answers: dict[str, Answer]) -> None:
    """Embeddings of a picture are those of the tower, which no adapter changes, and KV is not shared."""
    prompt, settings = picture_prompt(cluster), {"num_blocks": 2000, "threads": 1}
    lora = {name: str(bundled.ADAPTERS / name) for name in ("pirate", "json")}
    with running_cluster(worker={**settings, "lora": lora}) as other:
        asked = {
            (name, model): question(prompt, name, options=RequestOptions(model=model))
            for name in ("greedy", "filters", "json_schema", "beams")
            for model in ("", *lora)
        }
        together = ask_now(other, asked)
        again = ask_now(other, dict(reversed(asked.items())))
    for (name, model), answer in together.items():
        assert_same(again[name, model], answer, f"{name} {model}")
        if not model:
            assert_same(answer, answers[name], name)
    assert len({result_of(together["greedy", model]).text for model in ("", *lora)}) > 1
