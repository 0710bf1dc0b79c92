"""The compared requests are these numbers, to the last token id."""

from __future__ import annotations

import hashlib
import json

import pytest

from quire.bench.workload import workloads
from quire.bench.workload.workloads import WORKLOADS, BenchRequest
from quire.shared.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "digest"),
    [
        ("mixed", 256, 142_827, 133_966, "d72f19b572464c05"),
        ("single", 1, 512, 256, "4dfcee8a34ff36a1"),
        ("shared_prefix", 256, 540_672, 16_384, "7981707ae76b47e1"),
        ("prefill", 64, 262_144, 64, "c268767da06f7e84"),
        ("decode", 256, 32_768, 131_072, "01d7e0453fc65367"),
    ],
)
def test_the_requests_are_those_that_peers_were_measured_with(
    name: str, requests: int, prompt_tokens: int, output_tokens: int, digest: str
) -> None:
    work = WORKLOADS[name]()
    assert (len(work.items), work.num_prompt_tokens, work.num_output_tokens) == (requests, prompt_tokens, output_tokens)
    content = json.dumps([[list(item.prompt), item.num_output] for item in work.items])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("name", "requests", "length"), [("long32k", 8, 32_768), ("long120k", 2, 120_000)])
def test_long_prompts_fit_models_of_128k_positions(name: str, requests: int, length: int) -> None:
    (work,) = workloads.named(name)
    assert [(len(item.prompt), item.num_output) for item in work.items] == [(length, 128)] * requests
    assert length + 128 <= 131_072


@pytest.mark.parametrize(
    ("name", "requests", "shortest", "longest", "output"),
    [
        ("cpu_batch", 32, 32, 128, 64),
        ("cpu_single", 1, 128, 128, 64),
        ("cpu_prefix", 32, 528, 528, 16),
        ("cpu_stream8", 32, 32, 128, 64),
    ],
)
def test_the_small_ones_fit_the_bundled_model(
    name: str, requests: int, shortest: int, longest: int, output: int
) -> None:
    work = WORKLOADS[name]()
    lengths = [len(item.prompt) for item in work.items]
    assert len(lengths) == requests
    assert shortest <= min(lengths)
    assert max(lengths) <= longest
    assert {item.num_output for item in work.items} == {output}
    assert work.temperature == 0
    assert work.within(4096).items == work.items


@pytest.mark.parametrize(("name", "count", "length"), [("returning", 64, 4096), ("cpu_returning", 8, 768)])
def test_prompts_that_come_again_come_when_all_others_have_come(name: str, count: int, length: int) -> None:
    items = WORKLOADS[name]().items
    assert {len(item.prompt) for item in items} == {length}
    assert len({item.prompt for item in items[:count]}) == count
    assert items == items[:count] * 3


def test_requests_behind_a_prefix_share_it_and_nothing_more() -> None:
    prompts = [item.prompt for item in WORKLOADS["shared_prefix"]().items]
    assert len({prompt[:2048] for prompt in prompts}) == 1
    assert len({prompt[2048:] for prompt in prompts}) == len(prompts)


def test_ids_wrap_around_in_a_small_vocabulary_only() -> None:
    work = WORKLOADS["single"]()
    assert work.within(151_936) is work
    small = work.within(100)
    assert max(small.items[0].prompt) < 100
    assert small.items[0].num_output == work.items[0].num_output


def test_sets_name_several_and_an_unknown_one_names_all() -> None:
    assert [work.name for work in workloads.named("cpu,single")] == [*workloads.SETS["cpu"], "single"]
    with pytest.raises(InvalidArgument, match="'mixd' does not exist; available: mixed"):
        workloads.named("mixd")


def test_only_the_first_requests() -> None:
    assert len(WORKLOADS["mixed"]().first(3).items) == 3
    assert len(WORKLOADS["mixed"]().first(0).items) == 256
    twice = WORKLOADS["mixed"]().first(300).items
    assert (len(twice), twice[256:]) == (300, twice[:44])
    assert isinstance(WORKLOADS["mixed"]().first(1).items[0], BenchRequest)
