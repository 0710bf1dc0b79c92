"""Queued steps for a slow frontend are merged, and the frontend receives the same events."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from quire.services.scheduler.sessions import outbox
from quire.services.scheduler.sessions.outbox import Outbox
from quire.shared.columns import i32, i32_bytes, u32, u32_bytes
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

Step = dict[int, list[int]]


class Link:
    """Stream that takes nothing until the test says so."""

    def __init__(self) -> None:
        self.waiting: list[pb.SessionResponse] = []

    @property
    def last_unsent(self) -> pb.SessionResponse | None:
        return self.waiting[-1] if self.waiting else None

    def send(self, message: pb.SessionResponse) -> None:
        self.waiting.append(message)


def tokens_of(step: Step, **more: object) -> pb.SessionResponse:
    counts = [len(tokens) for tokens in step.values()]
    batch = pb.TokenBatch(
        sequence_ids=u32_bytes(list(step)),
        token_counts=b"" if all(count == 1 for count in counts) else u32_bytes(counts),
        token_ids=i32_bytes([token for tokens in step.values() for token in tokens]),
        **more,
    )
    return pb.SessionResponse(tokens=batch)


def heard(messages: list[pb.SessionResponse]) -> Step:
    """Returns the events that a frontend reads from messages."""
    streams: Step = defaultdict(list)
    for message in messages:
        ids, tokens = u32(message.tokens.sequence_ids).tolist(), i32(message.tokens.token_ids).tolist()
        counts = u32(message.tokens.token_counts).tolist() or [1] * len(ids)
        assert len(ids) == len(counts)
        assert len(set(ids)) == len(ids)
        for sequence, count in zip(ids, counts, strict=True):
            streams[sequence] += [tokens.pop(0) for _ in range(count)]
        assert not tokens
    return dict(streams)


steps = st.lists(
    st.dictionaries(st.integers(1, 9), st.lists(st.integers(-1, 2**31 - 1), min_size=1, max_size=3), max_size=6)
)


@given(steps)
def test_every_sequence_gets_its_tokens_in_order(sent: list[Step]) -> None:
    link = Link()
    box = Outbox(link)
    for step in sent:
        box.send(tokens_of(step))
    assert len(link.waiting) <= 1
    expected: Step = defaultdict(list)
    for step in sent:
        for sequence, tokens in step.items():
            expected[sequence] += tokens
    assert heard(link.waiting) == dict(expected)


def test_started_and_finished_events_are_merged() -> None:
    link = Link()
    box = Outbox(link)
    box.send(tokens_of({1: [5]}, started=[pb.StartedSequence(sequence_id=1)]))
    box.send(tokens_of({2: [6]}, started=[pb.StartedSequence(sequence_id=2)]))
    box.send(tokens_of({1: [7]}, finished=[pb.FinishedSequence(sequence_id=1)]))
    (message,) = link.waiting
    assert [started.sequence_id for started in message.tokens.started] == [1, 2]
    assert [finished.sequence_id for finished in message.tokens.finished] == [1]
    assert heard(link.waiting) == {1: [5, 7], 2: [6]}


def test_order_is_kept_and_log_probabilities_are_not_merged() -> None:
    link = Link()
    box = Outbox(link)
    view = pb.SessionResponse(cluster=pb.ClusterView())
    told = tokens_of({1: [8]}, logprobs=pb.LogprobBatch(sequence_ids=u32_bytes([1])))
    sent = [tokens_of({1: [5]}), view, tokens_of({1: [6]}), told, tokens_of({1: [9]})]
    for message in sent:
        box.send(message)
    assert link.waiting == sent


def test_vectors_are_not_merged() -> None:
    """Merging a step into a queued message must not lose its vectors."""
    link = Link()
    box = Outbox(link)
    pooled = pb.PooledBatch(sequence_ids=u32_bytes([3]), sizes=u32_bytes([1]), values=b"\0\0\x80\x3f")
    ended = tokens_of({1: [8]}, pooled=pooled, finished=[pb.FinishedSequence(sequence_id=3)])
    sent = [tokens_of({1: [5]}), ended, tokens_of({1: [9]})]
    for message in sent:
        box.send(message)
    assert link.waiting == sent


def test_merged_messages_stay_within_grpcs_limit() -> None:
    link, draw = Link(), random.Random(1)
    most = outbox.TOKEN_BYTES * outbox.MAX_TOKENS
    for _ in range(30):
        Outbox(link).send(tokens_of({i: [draw.randrange(1000)] for i in range(5000)}))
    assert len(link.waiting) == 3
    assert all(len(message.tokens.token_ids) <= most for message in link.waiting)
