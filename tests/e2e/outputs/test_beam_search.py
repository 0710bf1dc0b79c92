"""Beam search through a cluster, compared with a search that requests each token separately."""

from __future__ import annotations

import asyncio
import heapq

import httpx
import pytest

import quire.kernels.cpu
from quire import BeamSearch, SamplingParams
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from tests.waiting import eventually

PROMPTS = ["Once upon a time there was", "The lighthouse keeper", "What a"]
EOS = {0, 2}
exact = pytest.mark.skipif(
    quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise alone and in a batch"
)


def step_by_step(
    client: Client, prompt: str, width: int, max_tokens: int, penalty: float
) -> list[tuple[list[int], float]]:
    """Token ids and scores of the best beams, from log-probabilities of single tokens."""
    start = client.tokenize(prompt)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=max(2 * width, width + len(EOS)))
    for length in range(1, max_tokens + 1):
        results = client.generate([start + said for _, said in live], params)
        following = []
        for (total, said), result in zip(live, results, strict=True):
            (entry,) = result.outputs[0].logprobs or ()
            for token, logprob in entry.top.items():
                if token in EOS:
                    done.append(((total + logprob) / length**penalty, [*said, token]))
                else:
                    following.append((total + logprob, [*said, token]))
        live = heapq.nlargest(width, following, key=lambda beam: beam[0])
    done += [(total / len(said) ** penalty, said) for total, said in live]
    return [(said, score) for score, said in sorted(done, key=lambda end: -end[0])]


@exact
@pytest.mark.parametrize(("width", "n", "penalty"), [(1, 1, 1.0), (3, 2, 1.0), (4, 4, 0.0), (5, 3, 2.0)])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_sequences_of_a_search_by_hand(client: Client, prompt: str, width: int, n: int, penalty: float) -> None:
    search = BeamSearch(width, length_penalty=penalty)
    found = client.generate(prompt, SamplingParams(n=n, beam_search=search, max_tokens=20))[0]
    expected = step_by_step(client, prompt, width, 20, penalty)
    assert [output.score for output in found.outputs] == pytest.approx([score for _, score in expected[:n]], abs=1e-3)
    # Of equally good ones either may come first.
    assert {tuple(output.token_ids) for output in found.outputs} <= {tuple(said) for said, _ in expected[: n + 1]}


def test_width_one_is_greedy(client: Client) -> None:
    greedy = client.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, logprobs=2))[0].outputs[0]
    search = SamplingParams(beam_search=BeamSearch(1), max_tokens=40, logprobs=2)
    found = client.generate(PROMPTS[0], search)[0].outputs[0]
    assert (found.token_ids, found.text, found.finish_reason) == (greedy.token_ids, greedy.text, greedy.finish_reason)
    for own, other in zip(found.logprobs or (), greedy.logprobs or (), strict=True):
        assert (own.token_id, own.rank) == (other.token_id, other.rank)
        assert list(own.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)
    total = sum(entry.logprob for entry in found.logprobs or ())
    assert found.score == pytest.approx(total / len(found.token_ids), abs=1e-4)


def test_over_http_completions_and_chat(cluster: Cluster, client: Client) -> None:
    search = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "max_tokens": 12}
    params = SamplingParams(n=3, beam_search=BeamSearch(3, length_penalty=0.5), max_tokens=12)
    expected = client.generate(PROMPTS[0], params)[0]
    question = [{"role": "user", "content": "Hello! Who are you?"}]
    answers = client.chat(question, params)[0]
    with httpx.Client(base_url=f"http://{cluster.http_address}", timeout=60) as http:
        body = {"prompt": PROMPTS[0], **search}
        whole = http.post("/v1/completions", json=body).json()
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
        chat = http.post("/v1/chat/completions", json={"messages": question, **search}).json()
        refused = http.post("/v1/completions", json={**body, "stop": ["x"]}).json()
        penalty = http.post("/v1/completions", json={"prompt": "x", "length_penalty": 2}).json()
    assert [choice["text"] for choice in whole["choices"]] == [output.text for output in expected.outputs]
    assert all(output.text in streamed for output in expected.outputs)
    assert [choice["message"]["content"] for choice in chat["choices"]] == [output.text for output in answers.outputs]
    assert whole["usage"]["completion_tokens"] == sum(len(output.token_ids) for output in expected.outputs)
    assert refused["error"]["message"] == "stop is not supported together with beam search."
    assert penalty["error"]["message"] == "length_penalty requires use_beam_search=true."


def test_parameters_incompatible_with_beam_search_are_refused_by_name(client: Client) -> None:
    for field, value in (("presence_penalty", 1.0), ("bad_words", ["x"]), ("prompt_logprobs", 0), ("n", 5)):
        with pytest.raises(InvalidArgument, match=field):
            client.generate("x", SamplingParams(**{"beam_search": BeamSearch(3), field: value}))


def test_bias_and_allowed_tokens_bound_the_search(client: Client) -> None:
    allowed = client.tokenize(" there was a calm fox")
    params = SamplingParams(n=2, beam_search=BeamSearch(4), max_tokens=6, allowed_token_ids=allowed)
    for output in client.generate(PROMPTS[0], params)[0].outputs:
        assert set(output.token_ids) <= set(allowed)


async def test_a_client_that_leaves_frees_all_beams(cluster: Cluster, client: Client) -> None:
    params = SamplingParams(n=4, beam_search=BeamSearch(8), max_tokens=3000, ignore_eos=True)
    own = AsyncClient(cluster.grpc_address)
    task = asyncio.ensure_future(own.generate(PROMPTS[0], params))
    async with asyncio.timeout(60):
        await eventually(lambda: engine_core_of(client)[0] >= 8)
        task.cancel()
        await eventually(lambda: not any(engine_core_of(client)))
    await own.close()


def engine_core_of(client: Client) -> tuple[int, int]:
    """Number of running sequences and of blocks in use."""
    (scheduler,) = (status for status in client.status() if status.role == admin_pb2.ROLE_SCHEDULER)
    return scheduler.running, scheduler.blocks.used
