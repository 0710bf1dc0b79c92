"""Metrics of /metrics match what clients observed."""

from __future__ import annotations

import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from quire import SamplingParams
from quire.client import Client
from tests.e2e.conftest import running_cluster

DOCUMENT = "The lighthouse keeper counts the boats that come home. " * 20
MODEL = ("model_name", "quire-tiny")


def page(address: str) -> dict[str, float]:
    """Every sample by name, summed over labels."""
    text = httpx.get(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"}, timeout=60).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                values[sample.name] = values.get(sample.name, 0) + sample.value
    return values


def test_counts_and_latencies_match_what_clients_saw() -> None:
    with running_cluster(worker={"num_blocks": 300}) as cluster, Client(cluster.grpc_address) as client:
        begin = time.monotonic()
        results = []
        for i in range(6):
            results += client.generate(
                f"{DOCUMENT}{i}", SamplingParams(temperature=0, max_tokens=10 + i, ignore_eos=True)
            )
        elapsed = time.monotonic() - begin
        frontend = page(cluster.http_address)
        scheduler = page(next(p for p in cluster.processes if p.spec.role == "scheduler").addresses["metrics"])
    prompt_tokens = sum(result.prompt_tokens for result in results)
    cached_tokens = sum(result.cached_tokens for result in results)
    generated = sum(len(result.outputs[0].token_ids) for result in results)
    assert generated == sum(10 + i for i in range(6))
    assert cached_tokens > 4 * results[0].prompt_tokens, "all but the first find the document cached"
    assert frontend["vllm:request_success_total"] == 6
    assert frontend["vllm:prompt_tokens_total"] == prompt_tokens
    assert frontend["vllm:prompt_tokens_cached_total"] == cached_tokens
    assert frontend["vllm:generation_tokens_total"] == generated
    assert (frontend["vllm:request_num_preemptions_count"], frontend["vllm:request_num_preemptions_sum"]) == (6, 0)
    assert frontend["vllm:request_prefill_kv_computed_tokens_sum"] == prompt_tokens - cached_tokens
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency"):
        assert frontend[f"vllm:{name}_seconds_count"] == 6
    assert 0 < frontend["vllm:e2e_request_latency_seconds_sum"] <= elapsed
    assert frontend["vllm:time_to_first_token_seconds_sum"] < frontend["vllm:e2e_request_latency_seconds_sum"]
    assert scheduler["vllm:prefix_cache_queries_total"] == prompt_tokens
    assert scheduler["vllm:prefix_cache_hits_total"] == cached_tokens
    assert scheduler["quire_scheduler_generated_tokens_total"] == generated
    assert scheduler["vllm:num_preemptions_total"] == 0
    assert scheduler["vllm:iteration_tokens_total_count"] >= generated  # a step each, one request at a time
    assert scheduler["vllm:iteration_tokens_total_sum"] >= prompt_tokens - cached_tokens + generated - 6
    assert scheduler["vllm:num_requests_running"] == scheduler["quire_scheduler_blocks_unowned"] == 0
    assert scheduler["quire_scheduler_blocks_cached"] > 0
