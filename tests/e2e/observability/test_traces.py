"""Traces of requests as a collector receives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.conftest import running_cluster

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra `tracing` is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE = "0af7651916cd43dd8448eb211c80319c"
ABOVE = "b7ad6b7169203331"
PARTS = ["tokenize", "schedule", "prefill", "decode", "write"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores received spans by service."""

    def __init__(self) -> None:
        self._has_news = threading.Condition()
        self._spans: list[tuple[str, Span]] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._has_news:
            for resource in request.resource_spans:
                names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                self._spans += [(names["service.name"], span) for span in spans]
            self._has_news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def await_spans(self, count: int) -> list[tuple[str, Span]]:
        with self._has_news:
            assert self._has_news.wait_for(lambda: len(self._spans) >= count, 60), self._spans
            return list(self._spans)


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def values(span: Any) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        found[attribute.key] = getattr(attribute.value, kind)
    return found


def ask(address: str, traceparent: str = "") -> httpx.Response:
    headers = {"x-request-id": "seen-everywhere", **({"traceparent": traceparent} if traceparent else {})}
    body = {"model": "quire-tiny", "prompt": "Once upon", "max_tokens": 6, "ignore_eos": True}
    return httpx.post(f"http://{address}/v1/completions", json=body, headers=headers)


def test_a_request_s_trace_goes_through_all_hops_under_the_client_s_own() -> None:
    with collecting() as (collector, endpoint):
        settings = {"otlp_traces_endpoint": endpoint}
        with running_cluster(worker={"num_blocks": 300}, scheduler=settings, frontend=settings) as cluster:
            begin_ns = time.time_ns()
            assert ask(cluster.http_address, f"00-{TRACE}-{ABOVE}-01").status_code == 200
            spans = collector.await_spans(2 + len(PARTS))
            end_ns = time.time_ns()
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    by_name = {span.name: (service, span) for service, span in spans}
    service, request = by_name["llm_request"]
    assert service == "quire-frontend"
    assert request.parent_span_id.hex() == ABOVE
    told = values(request)
    assert told["gen_ai.request.id"] == "seen-everywhere"
    assert told["gen_ai.usage.completion_tokens"] == 6
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    edges = [begin_ns, request.start_time_unix_nano]
    for name in PARTS:
        part = by_name[name][1]
        if by_name[name][0] == "quire-frontend":
            assert part.parent_span_id == request.span_id
    service, schedule = next((service, span) for service, span in spans if service == "quire-scheduler")
    assert schedule.parent_span_id == request.span_id
    assert [event.name for event in schedule.events].count("admitted") == 1
    steps = [values(event) for event in schedule.events if event.name == "step"]
    assert len(steps) >= 6, "a step for each token at least"
    assert steps[0]["quire.worker"] == "worker-0"
    assert sum(step["quire.step.forward_us"] for step in steps) > 0
    assert values(schedule)["quire.finish_reason"] == "length"
    assert edges == sorted(edges)
    assert request.end_time_unix_nano <= end_ns


def test_unsampled_traces_are_not_exported_and_ratios_apply_to_undecided_ones() -> None:
    with collecting() as (collector, endpoint):
        settings = {"otlp_traces_endpoint": endpoint, "otlp_traces_ratio": 0.0}
        with running_cluster(worker={"num_blocks": 300}, scheduler=settings, frontend=settings) as cluster:
            assert ask(cluster.http_address).status_code == 200
            assert ask(cluster.http_address, f"00-{TRACE}-{ABOVE}-00").status_code == 200
            assert ask(cluster.http_address, "nonsense").status_code == 200
            assert ask(cluster.http_address, f"00-{TRACE}-{ABOVE}-01").status_code == 200
            spans = collector.await_spans(2 + len(PARTS))
    assert len(spans) == 2 + len(PARTS)


def test_refused_and_abandoned_requests_are_traced_under_the_client_span() -> None:
    """mt02, vllm#56696: only successful requests had spans."""
    with collecting() as (collector, endpoint):
        settings = {"otlp_traces_endpoint": endpoint}
        with running_cluster(worker={"num_blocks": 300}, frontend=settings) as cluster:
            url = f"http://{cluster.http_address}/v1/completions"
            headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
            body = {"model": "quire-tiny", "prompt": "Once upon", "max_tokens": 1500, "ignore_eos": True}
            assert httpx.post(url, json={**body, "top_p": 7}, headers=headers).status_code == 400
            with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers) as reply:
                next(reply.iter_lines())
            spans = collector.await_spans(2)
    requests = [span for _, span in spans if span.name == "llm_request"]
    assert len(requests) == 2
    for span in requests:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, ABOVE)


@pytest.mark.slow
def test_unreachable_collector_blocks_no_request() -> None:
    settings = {"otlp_traces_endpoint": "http://127.0.0.1:1"}
    with running_cluster(worker={"num_blocks": 300}, scheduler=settings, frontend=settings) as cluster:
        assert all(ask(cluster.http_address).status_code == 200 for _ in range(3))
