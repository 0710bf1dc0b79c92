"""Submissions that wait for the stream travel together, in order, and only to schedulers that read them so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.services.frontend.scheduler_client import outbox
from quire.services.frontend.scheduler_client.outbox import Outbox
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler


class Link:
    """A stream that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[pb.SessionRequest] = []

    @property
    def last_unsent(self) -> pb.SessionRequest | None:
        return self.waiting[-1] if self.waiting else None

    def send(self, message: pb.SessionRequest) -> None:
        self.waiting.append(message)


def ids(message: pb.SessionRequest) -> list[int]:
    return [each.first_sequence_id for each in (message.submission, *message.further_submissions)]


def submit(box: Outbox, *numbers: int, num_bytes: int = 0) -> None:
    for number in numbers:
        box.submit(pb.Submission(first_sequence_id=number, token_ids=bytes(num_bytes)))


def test_what_waits_is_one_message() -> None:
    link = Link()
    box = Outbox(link, supports_merging=True)
    submit(box, 1, 2)
    taken = link.waiting.pop()
    submit(box, 3, 4, 5)
    assert [ids(message) for message in (taken, *link.waiting)] == [[1, 2], [3, 4, 5]]


def test_a_cancellation_keeps_its_place() -> None:
    link = Link()
    box = Outbox(link, supports_merging=True)
    submit(box, 1)
    link.send(pb.SessionRequest(cancellation=pb.Cancellation()))
    submit(box, 2, 3)
    kinds = [message.WhichOneof("message") for message in link.waiting]
    assert kinds == ["submission", "cancellation", "submission"]
    assert ids(link.waiting[-1]) == [2, 3]


def test_an_older_scheduler_gets_one_after_the_other() -> None:
    link = Link()
    submit(Outbox(link, supports_merging=False), 1, 2, 3)
    assert [ids(message) for message in link.waiting] == [[1], [2], [3]]


def test_messages_stay_below_what_grpc_takes() -> None:
    link = Link()
    box = Outbox(link, supports_merging=True)
    submit(box, 1, 2, 3, num_bytes=outbox.MAX_BYTES // 2 - 100)
    submit(box, 4, num_bytes=3 * outbox.MAX_BYTES)
    submit(box, 5)
    assert [ids(message) for message in link.waiting] == [[1, 2], [3], [4], [5]]


@pytest.mark.parametrize("takes_further", [True, False])
async def test_a_burst_is_answered_by_schedulers_of_both_kinds(folder: Path, takes_further: bool) -> None:
    script = ScriptedScheduler()
    script.takes_further_submissions = takes_further
    async with scheduler(script), running(folder, script.address) as edge:
        body = {"prompt": "hello", "max_tokens": 3}
        replies = await asyncio.gather(*(edge.http.post("/v1/completions", json=body) for _ in range(40)))
    assert [reply.status_code for reply in replies] == [200] * 40
    assert sorted(each.first_sequence_id for each in script.submissions) == list(range(1, 41))
