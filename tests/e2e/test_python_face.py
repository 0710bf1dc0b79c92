"""`LLM`, `AsyncLLM` and `Client` as README shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.client import AsyncClient, Client
from quire.cluster import Cluster
from shared.errors import InvalidArgument

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SCRIPT = """
from quire import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(num_blocks=300) as llm:
        print(llm.chat([{"role": "user", "content": "What is 2 + 3?"}], SamplingParams(temperature=0))[0].text)
        print(" ".join(str(process.pid) for process in llm._cluster.processes))
"""


def test_a_script_starts_a_cluster_and_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    answer, pids = done.stdout.splitlines()
    assert answer == "5"
    assert len(pids.split()) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.split())


def test_prompts_come_back_in_order_with_tokens_and_usage(client: Client) -> None:
    prompts = ["Once upon a time", client.tokenize("Once upon"), "The"]
    results = client.generate(prompts, GREEDY)
    assert [result.prompt for result in results] == prompts
    for result in results:
        sample = result.outputs[0]
        assert 1 <= len(sample.token_ids) <= 16
        assert sample.finish_reason in {"stop", "length"}
        assert result.prompt_tokens > 0
        assert client.detokenize(sample.token_ids).startswith(sample.text[:5])


def test_samples_differ_and_a_seed_repeats_them(client: Client) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=24)
    first, second = (client.generate("Once upon a time", params)[0] for _ in range(2))
    assert [s.token_ids for s in first.outputs] == [s.token_ids for s in second.outputs]
    assert len({tuple(s.token_ids) for s in first.outputs}) == 3


def test_logprobs_come_with_every_token(client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    sample = client.generate("Once upon a time", params)[0].outputs[0]
    assert sample.logprobs is not None
    assert [entry.token_id for entry in sample.logprobs] == sample.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in sample.logprobs)


async def test_the_asynchronous_face_streams_and_gathers(cluster: Cluster) -> None:
    async with AsyncLLM(address=cluster.grpc_address) as llm:
        whole = await llm.generate("Once upon a time", GREEDY)
        parts = [delta.text async for delta in llm.stream("Once upon a time", GREEDY)]
    assert "".join(parts) == whole.text


async def test_leaving_an_asynchronous_stream_early_is_clean(cluster: Cluster) -> None:
    client = AsyncClient(cluster.grpc_address)
    async for _ in client.stream("Once", SamplingParams(max_tokens=2000, ignore_eos=True)):
        break
    await client.close()


def test_a_wrong_value_is_an_error_that_names_it(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="temperature must be in"):
        client.generate("x", SamplingParams(temperature=3))
    with pytest.raises(InvalidArgument, match="unknown setting num_block=3"):
        LLM(num_block=3)


def test_a_sample_of_several_is_what_it_would_be_alone(client: Client) -> None:
    """They share the blocks of the prompt, the last of which is copied for each."""
    prompt = client.tokenize("Once upon a time there was a small lighthouse by the sea, and in it lived")
    assert len(prompt) % 16
    together = client.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=100, max_tokens=40, ignore_eos=True))
    for number, sample in enumerate(together[0].outputs):
        alone = SamplingParams(temperature=1.0, seed=100 + number, max_tokens=40, ignore_eos=True)
        assert client.generate(prompt, alone)[0].outputs[0].token_ids == sample.token_ids
