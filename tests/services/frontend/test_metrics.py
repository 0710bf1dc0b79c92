"""Tests that every count of the metrics page equals what clients received."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

Sampling = sampling_pb2.SamplingParams
CALLS = "quire_frontend_tenant_calls_total"


@dataclass
class ClientCounts:
    """Counts of what clients received."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    deliveries: int = 0
    samples: int = 0
    prompts: int = 0

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.samples += 1


async def over_http(frontend: Running, counts: ClientCounts, body: dict[str, Any], num_prompts: int = 1) -> None:
    reply = (await frontend.http.post("/v1/completions", json=body)).json()
    counts.prompt_tokens += reply["usage"]["prompt_tokens"]
    counts.completion_tokens += reply["usage"]["completion_tokens"]
    counts.cached_tokens += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    counts.prompts += num_prompts
    for choice in reply["choices"]:
        counts.finish(choice["finish_reason"])


async def over_grpc(frontend: Running, counts: ClientCounts, request: pb.GenerateRequest) -> None:
    messages = [m async for m in frontend.inference.Generate(request)]
    counts.prompt_tokens += messages[0].usage.prompt_tokens
    counts.cached_tokens += messages[0].usage.cached_tokens
    counts.completion_tokens += sum(len(m.token_ids) for m in messages)
    counts.prompts += 1
    for m in messages:
        if m.finish_reason:
            counts.finish({1: "stop", 2: "length"}[m.finish_reason])


async def test_metrics_equal_the_clients_counts(folder: Path) -> None:
    script, counts = ScriptedScheduler(count_up), ClientCounts()
    script.num_cached_tokens = 1
    async with scheduler(script), running(folder, script.address) as frontend:
        work = [over_http(frontend, counts, {"prompt": "hello world", "max_tokens": n + 1}) for n in range(5)]
        work += [over_http(frontend, counts, {"prompt": ["a b", [9, 8, 7]], "n": 2, "max_tokens": 4}, 2)]
        work += [over_http(frontend, counts, {"prompt": "x", "seed": 5, "max_tokens": 50, "stop_token_ids": [9]})]
        for n in (1, 3):
            sampling = Sampling(max_tokens=7, n=n)
            work.append(over_grpc(frontend, counts, pb.GenerateRequest(text="hello there", sampling=sampling)))
        await asyncio.gather(*work)
        await frontend.until_idle()
        metrics = await frontend.metrics()
    assert metrics["vllm:prompt_tokens_total"] == counts.prompt_tokens
    assert metrics["vllm:prompt_tokens_cached_total"] == counts.cached_tokens == counts.prompts
    assert metrics["vllm:generation_tokens_total"] == counts.completion_tokens
    reasons = {
        reason: metrics[f"vllm:request_success_total{{finished_reason={reason}}}"]
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 1, "length": counts.samples - 1, "abort": 0, "error": 0}
    assert counts.finished == {"stop": 1, "length": counts.samples - 1}
    for name, count in (
        ("time_to_first_token_seconds", counts.samples),
        ("e2e_request_latency_seconds", counts.samples),
        ("request_queue_time_seconds", counts.samples),
        ("request_generation_tokens", counts.samples),
        ("inter_token_latency_seconds", counts.completion_tokens - counts.samples),
        ("request_prompt_tokens", counts.prompts),
        ("request_params_n", counts.prompts),
        ("request_params_max_tokens", counts.prompts),
        ("request_max_num_generation_tokens", counts.prompts),
    ):
        assert metrics[f"vllm:{name}_count"] == count, name
    assert metrics["vllm:request_generation_tokens_sum"] == counts.completion_tokens
    assert metrics["vllm:request_prompt_tokens_sum"] == counts.prompt_tokens
    assert metrics["vllm:request_params_n_sum"] == 1 * 5 + 2 * 2 + 1 + 1 + 3
    assert metrics["vllm:request_time_per_output_token_seconds_count"] == counts.samples - 1  # one had a single token
    assert metrics["vllm:inter_token_latency_seconds_bucket{le=+Inf}"] == counts.completion_tokens - counts.samples
    assert metrics["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"] == 7
    assert metrics["quire_frontend_grpc_requests_total{code=OK,method=Generate}"] == 2
    assert metrics["quire_frontend_inflight_requests"] == metrics["quire_frontend_queued_tokens"] == 0
    assert metrics["quire_frontend_sessions_open"] == 1


async def test_a_sample_counts_as_often_as_its_scheduler_preempted_it(folder: Path) -> None:
    """Checks vLLM's vllm:request_num_preemptions, also for samples without preemption and for ends at a stop string."""
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        for num_preemptions in (0, 3, 0):
            script.num_preemptions = num_preemptions
            await frontend.http.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 4})
        counted = {"prompt": "x", "seed": 104, "max_tokens": 4}
        text = (await frontend.http.post("/v1/completions", json=counted)).json()["choices"][0]["text"]
        script.num_preemptions = 7
        stopped = await frontend.http.post("/v1/completions", json={**counted, "stop": [text]})
        await frontend.until_idle()
        metrics = await frontend.metrics()
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    assert metrics["vllm:request_num_preemptions_sum"] == 6 + 7
    buckets = [metrics[f"vllm:request_num_preemptions_bucket{{le={edge}}}"] for edge in ("0.0", "2.0", "5.0", "10.0")]
    assert buckets == [5, 5, 7, 8]


async def test_computed_prompt_tokens_exclude_cached_ones(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        for script.num_cached_tokens in (0, 2):
            await frontend.http.post("/v1/completions", json={"prompt": [5, 6, 7, 8], "n": 2, "max_tokens": 2})
        await frontend.until_idle()
        metrics = await frontend.metrics()
    assert metrics["vllm:request_prefill_kv_computed_tokens_count"] == 2
    assert metrics["vllm:request_prefill_kv_computed_tokens_sum"] == 4 + 2


async def test_http_requests_are_counted_by_route_and_class_of_status(folder: Path) -> None:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address) as frontend:
        await frontend.http.post("/v1/completions", json={"prompt": "x", "n": 0})
        await frontend.http.get("/v1/models/tiny")
        await frontend.http.get("/a/path/nobody/serves")
        metrics = await frontend.metrics()
    assert metrics["http_requests_total{handler=/v1/completions,method=POST,status=4xx}"] == 1
    assert metrics["http_requests_total{handler=/v1/models/{name:path},method=GET,status=2xx}"] == 1
    assert metrics["http_requests_total{handler=none,method=GET,status=4xx}"] == 1
    assert metrics["http_request_duration_seconds_count{handler=/v1/completions,method=POST}"] == 1


async def test_calls_are_counted_by_tenant_and_time_span(folder: Path) -> None:
    body = {"prompt": "hello world", "max_tokens": 3}
    async with scheduler(ScriptedScheduler(count_up)) as script, running(folder, script.address) as frontend:
        for tenant in ("a", "a", "b"):
            await frontend.http.post("/v1/completions", json=body, headers={"x-tenant": tenant})
        refused = await frontend.http.post("/v1/completions", json={**body, "n": 0}, headers={"x-tenant": "b"})
        await frontend.http.post("/v1/completions", json=body)
        await frontend.until_idle()
        metrics = await frontend.metrics()
    assert refused.status_code == 400
    answered = {tenant: metrics[f"{CALLS}{{outcome=answered,tenant={tenant}}}"] for tenant in ("a", "b", "(none)")}
    assert answered == {"a": 2, "b": 1, "(none)": 1}
    assert sum(metrics[f"{CALLS}{{outcome=failed,tenant={tenant}}}"] for tenant in ("b", "(none)")) == 1
    assert metrics["quire_frontend_tenant_tokens_total{kind=output,tenant=a}"] == 6
    assert metrics["quire_frontend_tenant_first_token_seconds_count{tenant=a}"] == 2
    for part in ("tokenize", "queue", "hop", "prefill", "decode", "write"):
        assert metrics[f"quire_frontend_request_part_seconds_count{{part={part}}}"] == 4, part
