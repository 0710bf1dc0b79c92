"""Generation paused from Python, through every service."""

from __future__ import annotations

import itertools

import pytest

from quire import SamplingParams
from quire.cli.main import main
from quire.client import Client
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from tests.waiting import until_idle

GREEDY = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=3500, ignore_eos=True)  # seconds: it runs when the pause comes


@pytest.fixture(autouse=True)
def idle(client: Client) -> None:
    """Waits until streams of other tests are cancelled, as they would be counted."""
    until_idle(client)


def test_paused_stream_continues(client: Client) -> None:
    (expected,) = client.generate("Count", GREEDY)
    stream = client.stream("Count", LONG)
    text = "".join(delta.text for delta in itertools.islice(stream, 3))
    try:
        assert client.pause_generation() == 1
        states = {service.role: service.state for service in client.status()}
    finally:
        client.resume_generation()
    while len(text) < len(expected.text):
        text += next(stream).text
    stream.close()
    assert text.startswith(expected.text)
    assert states[admin_pb2.ROLE_WORKER] == admin_pb2.STATE_PAUSED


def test_a_stream_that_is_aborted_ends_with_what_it_has(client: Client) -> None:
    try:
        stream = client.stream("Count", LONG)
        next(stream)
        assert client.pause_generation("abort") == 1
        *_, last = stream
    finally:
        client.resume_generation()
    assert last.finish_reason == "cancelled"
    with pytest.raises(InvalidArgument, match="keep, abort, wait, got 'later'"):
        client.pause_generation("later")


def test_what_runs_may_end_first(client: Client) -> None:
    (expected,) = client.generate("Count", GREEDY)
    stream = client.stream("Count", GREEDY)
    first = next(stream)
    try:
        assert client.pause_generation("wait") == 0
        text = "".join(delta.text for delta in [first, *stream])
    finally:
        client.resume_generation()
    assert text == expected.text


def test_from_a_shell(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["pause", "--mode", "wait", "--address", client.address]) == 0
        states = {service.role: service.state for service in client.status()}
    finally:
        assert main(["resume", "--address", client.address]) == 0
    assert states[admin_pb2.ROLE_SCHEDULER] == admin_pb2.STATE_PAUSED
    assert capsys.readouterr().out == "generation is paused; waiting sequences: 0\ngeneration has resumed\n"
    assert client.generate("Count", GREEDY)
