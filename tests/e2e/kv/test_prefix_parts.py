"""Large blocks through real processes: prefixes are matched to the token, and outputs do not change."""

from __future__ import annotations

from typing import Any

import pytest

from quire import SamplingParams
from quire.client import Client
from tests.e2e.conftest import running_cluster
from tests.e2e.outputs.test_mixed_streams import ask
from tests.waiting import worker_of
from tools.evals import held_back_items

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONGEST = 2000  # characters
ROUNDS = 5  # at most, until a sequence was preempted
COARSE: dict[str, Any] = {"block_size": 64, "num_blocks": 60}


def test_the_usage_says_what_was_cached(client: Client) -> None:
    question = held_back_items(1, names=("recall",))[0].messages[0]["content"]
    messages = [{"role": "user", "content": question}]
    expected = client.chat(messages, GREEDY)[0]
    with running_cluster(worker=COARSE) as cluster, Client(cluster.grpc_address) as coarse:
        first, again = (coarse.chat(messages, GREEDY)[0] for _ in range(2))
        follow_up = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
        third = coarse.chat(follow_up, GREEDY)[0]
    assert [first.text, again.text] == [expected.text] * 2
    num_prompt = first.prompt_tokens
    assert num_prompt % 64 >= 16, "the question was to end well within a block"
    assert (first.cached_tokens, again.cached_tokens) == (0, num_prompt - 1), "the last one is computed again"
    assert third.cached_tokens >= num_prompt
    assert third.text == client.chat(follow_up, GREEDY)[0].text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", ["", '{"method": "ngram", "num_speculative_tokens": 3}'])
def test_concurrent_requests_in_few_blocks_are_unchanged(config: str) -> None:
    items = held_back_items(4, names=("recall", "counting", "lists"))
    items = [item for item in items if len(item.messages[0]["content"]) < LONGEST] * 2
    worker = COARSE | {"num_blocks": 24, "max_num_batched_tokens": 256, "speculative_config": config}
    texts = []
    for grain in (16, 0):
        scheduler = {"prefix_grain": grain, "watermark": 0.0}
        with (
            running_cluster(worker=worker, scheduler=scheduler) as cluster,
            Client(cluster.grpc_address) as client,
        ):
            for _ in range(ROUNDS):
                texts.append([r.outputs[0].token_ids for r in ask(client, items, at_a_time=len(items))])
                if worker_of(client).work.preemptions:
                    break
            else:
                raise AssertionError("23 blocks were meant to be too few")
    assert all(said == texts[0] for said in texts)
