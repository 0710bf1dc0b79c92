"""One open session with a scheduler: the sequences that run there, and the loop that reads what its steps give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from quire.services.frontend.scheduler_client import submission, token_batch
from quire.services.frontend.scheduler_client.outbox import Outbox
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.shared.columns import u32_bytes
from quire.shared.errors import Internal, QuireError, Unavailable
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.pb.common.v1 import finish_pb2, model_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.process.lifecycle import run_until_first
from quire.shared.rpc.duplex import Duplex

RENEW_AFTER_ID = 2**31  # ids are 32 bits and never used twice: a session this old is closed, the next counts from 1

Link = Duplex[pb.SessionResponse, pb.SessionRequest]


class SessionOwner(Protocol):
    """Whom a session tells what it cannot decide alone."""

    def on_view(self, session: Session) -> None:
        """The cluster behind it changed."""

    def on_resumed(self, sequence: Sequence, now: float) -> None:
        """This one has its first token since it moved."""

    def on_refused(self, sequence: Sequence, error: QuireError) -> None:
        """The scheduler ended this one with an error."""

    def on_tokens_delivered(self, seconds: float) -> None:
        """The tokens of one step were taken in, which took so long."""


class Session:
    """Open from the first ClusterView on, until run() returns or raises; ids are never used twice in it."""

    def __init__(
        self, link: Link, owner: SessionOwner, welcome: pb.SchedulerWelcome, check: Callable[[pb.ClusterView], None]
    ) -> None:
        """`check` raises for a view of a cluster that this frontend does not fit."""
        self._link = link
        self._check = check
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._next_id = 1
        self._outbox = Outbox(link, takes_further=welcome.takes_further_submissions)
        self.scheduler_id = welcome.scheduler_id
        self.epoch = welcome.epoch
        self.closed = asyncio.Event()
        self.live: dict[int, Sequence] = {}
        self.view = pb.ClusterView()
        self.num_tokens_since_view = 0  # submitted after the last view, and still waiting as far as is known
        self._told_update = 0  # of other schedulers' weights
        self._since_view: dict[int, int] = {}  # by sequence: its part of that
        self.last_tokens_s = self._loop.time()

    async def run(self) -> None:
        await run_until_first(self._read(), self._link.pump())

    async def _read(self) -> None:
        async for message in self._link.messages():
            match message.WhichOneof("message"):
                case "tokens":
                    self._on_tokens(message.tokens)
                case "cluster":
                    self._on_view(message.cluster)
        raise Unavailable(f"scheduler {self.scheduler_id} closed the session")

    def _on_view(self, view: pb.ClusterView) -> None:
        self._check(view)
        self.view = view
        self._since_view.clear()
        self.num_tokens_since_view = 0
        self._owner.on_view(self)

    def _on_tokens(self, batch: pb.TokenBatch) -> None:
        self.last_tokens_s = self._loop.time()
        if self._since_view:
            for sequence_id in (*(s.sequence_id for s in batch.started), *(f.sequence_id for f in batch.finished)):
                self._waits_no_more(sequence_id)
        began_s = perf_counter()
        delivery = token_batch.deliver(batch, self.live, self.last_tokens_s)
        took_s = perf_counter() - began_s
        self._send_cancellation(delivery.stopped, finish_pb2.FINISH_REASON_STOP)
        self._send_cancellation(delivery.broken, finish_pb2.FINISH_REASON_CANCELLED)
        for sequence in (*delivery.stopped, *delivery.broken):
            sequence.session = None
        for sequence in delivery.broken:
            self._owner.on_refused(sequence, Internal("internal error"))
        for sequence, error in delivery.refused:
            sequence.session = None
            self._owner.on_refused(sequence, error)
        for sequence in delivery.resumed:
            self._owner.on_resumed(sequence, self.last_tokens_s)
        self._owner.on_tokens_delivered(took_s)

    def submit(self, sequences: Seq[Sequence], num_cached: int = 0) -> None:
        """Consecutive samples of one work without tokens, or a single sequence with or without; `num_cached`: tokens of
        the prompt that need no computing there. If it raises, cancel() undoes what it did."""
        message = submission.build(sequences, self._next_id, self.view.layout, self._loop.time())
        num_tokens = len(message.token_ids) // TOKEN_BYTES - num_cached
        for sequence in sequences:
            sequence.session, sequence.id = self, self._next_id
            self.live[self._next_id] = sequence
            self._since_view[self._next_id] = num_tokens
            self.num_tokens_since_view += num_tokens
            self._next_id += 1
        self._outbox.submit(message)
        if self._next_id > RENEW_AFTER_ID:
            self._link.close()

    def send_weights(self, newest: model_pb2.WeightsIdentity) -> None:
        """Of another scheduler; once."""
        if max(self.view.weights.update, self._told_update) < newest.update:
            self._told_update = newest.update
            self._link.send(pb.SessionRequest(weights=newest))

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Ends them here; nothing more comes from them."""
        withdrawn = [sequence for sequence in sequences if self.live.pop(sequence.id, None) is not None]
        for sequence in sequences:
            sequence.session = None
            self._waits_no_more(sequence.id)
        self._send_cancellation(withdrawn, reason)

    def _waits_no_more(self, sequence_id: int) -> None:
        self.num_tokens_since_view -= self._since_view.pop(sequence_id, 0)

    def _send_cancellation(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        if sequences:
            ids = u32_bytes([sequence.id for sequence in sequences])
            self._link.send(pb.SessionRequest(cancellation=pb.Cancellation(sequence_ids=ids, reason=reason)))

    def abandon(self) -> list[Sequence]:
        """The sequences that a broken session leaves behind, in order of submission."""
        self.closed.set()
        orphans = list(self.live.values())
        self.live.clear()
        for sequence in orphans:
            sequence.session = None
        return orphans
