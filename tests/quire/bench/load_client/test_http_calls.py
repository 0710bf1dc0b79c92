"""Parsing of server-sent events from raw sockets, however the bytes are split."""

from __future__ import annotations

import json

import pytest

from quire.bench.load_client.http_calls import HttpCaller, events, root_of
from quire.bench.load_client.timing import Received, RequestTiming

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


BODY = (
    event("a")
    + event("b")
    + event("")
    + b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
)


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def in_pieces(content: bytes, size: int) -> Received:
    return [(float(i), content[i : i + size]) for i in range(0, len(content), size)]


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("answer", [HEAD + b"\r\n" + BODY, chunked(BODY, 5), chunked(BODY, 1000)])
def test_events_are_found_wherever_the_bytes_are_cut(answer: bytes, piece: int) -> None:
    found = [json.loads(payload) for _, payload in events(in_pieces(answer, piece))]
    assert [choice["text"] for e in found for choice in e["choices"]] == ["a", "b", ""]
    assert found[-1]["usage"] == {"completion_tokens": 7}


def test_an_event_came_when_its_last_byte_came() -> None:
    received = [(1.0, HEAD + b"\r\n"), (2.0, event("a")[:5]), (3.0, event("a")[5:] + event("b"))]
    assert [at for at, _ in events(received)] == [3.0, 3.0]


def settled(received: Received) -> RequestTiming:
    timing = RequestTiming(0.5)
    HttpCaller("127.0.0.1:1", "m", 0.0).settle(timing, received)
    return timing


def test_only_events_with_text_are_arrivals_and_usage_counts_the_tokens() -> None:
    timing = settled([(1.0, HEAD + b"\r\n" + event("a")), (2.0, BODY)])
    assert list(timing.arrivals) == [1.0, 2.0, 2.0]
    assert (timing.num_tokens, timing.error) == (7, "")


def test_a_refusal_is_an_error_with_its_text() -> None:
    assert "too many" in settled([(1.0, b"HTTP/1.1 429 Too Many\r\n\r\ntoo many")]).error
    assert settled([]).error == "no answer"


def test_an_error_within_the_stream_fails_the_request() -> None:
    assert "gone" in settled([(1.0, HEAD + b"\r\n" + event("a", error="gone"))]).error


@pytest.mark.parametrize("url", ["host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"])
def test_base_urls_may_name_the_api_or_not(url: str) -> None:
    assert root_of(url) == "http://host:8000"
