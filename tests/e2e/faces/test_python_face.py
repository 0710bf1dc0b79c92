"""`LLM`, `AsyncLLM` and `Client` as the README shows them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import FailedPrecondition, InvalidArgument

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SCRIPT = """
from quire import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(num_blocks=300) as llm:
        print(llm.chat([{"role": "user", "content": "What is 2 + 3?"}], SamplingParams(temperature=0))[0].text)
        print(llm.get_tokenizer().encode("Once upon") == llm.client.tokenize("Once upon"))
        print(" ".join(str(process.pid) for process in llm._cluster.processes))
"""


def test_script_starts_a_cluster_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    answer, is_its_tokenizer, pids = done.stdout.splitlines()
    assert (answer, is_its_tokenizer) == ("5", "True")
    assert len(pids.split()) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.split())


def test_prompts_return_in_order_with_tokens_and_usage(client: Client) -> None:
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


def test_logprobs_accompany_every_token(client: Client) -> None:
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


async def test_partial_outputs_are_iterated(cluster: Cluster) -> None:
    async with AsyncLLM(address=cluster.grpc_address) as llm:
        whole = await llm.generate({"prompt": "Once upon a time"}, GREEDY)
        far = [output async for output in llm.generate("Once upon a time", GREEDY, "mine")]
        both = await asyncio.gather(*(asyncio.create_task(llm.generate(text, GREEDY)) for text in ("One", "Two")))
    assert [output.request_id for output in far] == ["mine"] * len(far)
    assert [output.finished for output in far] == [False] * (len(far) - 1) + [True]
    assert all(whole.text.startswith(output.text) for output in far)
    assert far[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert (whole.prompt, len(both)) == ("Once upon a time", 2)


def test_prompts_are_dicts_and_each_has_parameters_of_its_own(cluster: Cluster, client: Client) -> None:
    ids = client.tokenize("Once upon")
    with LLM(address=cluster.grpc_address) as llm:
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (2, 3)]
        found = llm.generate([{"prompt_token_ids": ids}, {"prompt": "The"}], sampling_params=params, use_tqdm=True)
        alone = llm.generate({"prompt_token_ids": ids}, GREEDY)
        with pytest.raises(InvalidArgument, match="params: must have one entry for each of 1 prompts, got 2"):
            llm.generate("The", params)
        with pytest.raises(InvalidArgument, match="needs the key prompt or prompt_token_ids"):
            llm.generate({"cache_salt": "x"})
        with pytest.raises(FailedPrecondition, match="was not started by this program"):
            llm.get_tokenizer()
    assert [result.prompt for result in found] == [ids, "The"]
    assert [len(result.outputs[0].token_ids) for result in found] == [2, 3]
    assert alone[0].outputs[0].token_ids[:2] == found[0].outputs[0].token_ids


async def test_leaving_an_asynchronous_stream_early_is_clean(cluster: Cluster) -> None:
    async with AsyncClient(cluster.grpc_address) as client:
        async for _ in client.stream("Once", SamplingParams(max_tokens=2000, ignore_eos=True)):
            break
    with pytest.raises(Exception, match="closed"):
        await client.generate("Once")


def test_a_wrong_value_is_an_error_that_names_it(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="temperature must be in"):
        client.generate("x", SamplingParams(temperature=3))
    with pytest.raises(InvalidArgument, match="unknown setting num_block=3"):
        LLM(num_block=3)


def test_sample_of_several_equals_a_single_one(client: Client) -> None:
    """Samples share the prompt's blocks, the last of which is copied for each."""
    prompt = client.tokenize("Once upon a time there was a small lighthouse by the sea, and in it lived")
    assert len(prompt) % 16
    together = client.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=100, max_tokens=40, ignore_eos=True))
    for number, sample in enumerate(together[0].outputs):
        alone = SamplingParams(temperature=1.0, seed=100 + number, max_tokens=40, ignore_eos=True)
        assert client.generate(prompt, alone)[0].outputs[0].token_ids == sample.token_ids
