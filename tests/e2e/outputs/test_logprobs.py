"""Log-probabilities through a cluster: those of a prompt equal those of generating it."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

import quire.kernels.cpu
from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from quire.outputs import FlatLogprobs, Logprob

# The compiled kernels sum a row in the same order in a chunk and alone, so that only log-softmax may differ in its last
# bits. Plain torch does not, and its bfloat16 logits differ in their last bits.
EXACT = quire.kernels.cpu.unavailable() is None
TOLERANCE = 1e-4 if EXACT else 0.2
STORY = "Once upon a time"


def numbers(logprobs: Sequence[Logprob] | None) -> list[tuple[int, float, int]]:
    assert logprobs is not None
    return [(entry.token_id, entry.logprob, entry.rank) for entry in logprobs]


def assert_same(found: Sequence[Logprob] | None, expected: Sequence[Logprob] | None) -> None:
    assert [t for t, _, _ in numbers(found)] == [t for t, _, _ in numbers(expected)]
    if EXACT:
        assert [r for _, _, r in numbers(found)] == [r for _, _, r in numbers(expected)]
    assert [p for _, p, _ in numbers(found)] == pytest.approx([p for _, p, _ in numbers(expected)], abs=TOLERANCE)


def test_prompt_logprobs_equal_those_of_generating_it(client: Client) -> None:
    """Also with a fully cached prompt, and from the middle on."""
    start = client.tokenize(STORY)
    said = client.generate(start, SamplingParams(temperature=0.8, seed=5, max_tokens=60, logprobs=3, ignore_eos=True))
    sample = said[0].outputs[0]
    tokens = start + sample.token_ids
    for first in (len(start), len(start) + 40):
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, prompt_logprob_start=first)
        result = client.generate(tokens, asked)[0]
        assert sample.logprobs is not None
        assert result.prompt_logprobs is not None
        assert_same(result.prompt_logprobs, sample.logprobs[first - len(start) :])
        if EXACT:
            told = sample.logprobs[first - len(start) :]
            assert [list(e.top) for e in result.prompt_logprobs] == [list(e.top) for e in told]
        assert (result.cached_tokens > 0) == (first > 16), "blocks before the first position may come from the cache"


def test_a_prompt_of_many_steps(client: Client) -> None:
    """2,600 tokens in steps of at most 2,048."""
    tokens = (client.tokenize("The lighthouse keeper counted the ships that passed by in the night. ") * 400)[:2600]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = client.generate(tokens, params)[0]
    half = client.generate(tokens[:1300], params)[0]
    assert len(whole.prompt_logprobs or ()) == 2599
    assert_same((whole.prompt_logprobs or ())[:1299], half.prompt_logprobs)


def test_flat_ones_read_like_the_others(client: Client) -> None:
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 2, "prompt_logprobs": 1}
    plain = client.generate(STORY, SamplingParams(**params))[0]
    flat = client.generate(STORY, SamplingParams(**params, flat_logprobs=True))[0]
    for arrays, listed in (
        (flat.prompt_logprobs, plain.prompt_logprobs),
        (flat.outputs[0].logprobs, plain.outputs[0].logprobs),
    ):
        assert isinstance(arrays, FlatLogprobs)
        assert listed is not None
        assert list(arrays) == list(listed)
        assert arrays[-1] == listed[-1]
        assert arrays[1:3] == list(listed[1:3])


def test_scoring_choices_over_http(cluster: Cluster) -> None:
    """Scoring as evaluation harnesses do it: the likelier continuation has the higher sum."""
    body = {"echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    sums = {}
    with httpx.Client(base_url=f"http://{cluster.http_address}", timeout=60) as http:
        for ending in (" there was", " was there"):
            choice = http.post("/v1/completions", json={**body, "prompt": STORY + ending}).json()["choices"][0]
            assert choice["text"] == STORY + ending
            assert "".join(choice["logprobs"]["tokens"]) == STORY + ending
            sums[ending] = sum(choice["logprobs"]["token_logprobs"][-2:])
    assert sums[" there was"] > sums[" was there"] + 5
