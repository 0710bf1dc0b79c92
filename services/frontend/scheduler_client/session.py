"""One open session with a scheduler: its sequences, and the loop that reads step results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from quire.services.frontend.bounds.bodies.heavy_work import leave_turns
from quire.services.frontend.scheduler_client import submission, token_batch
from quire.services.frontend.scheduler_client.outbox import Outbox
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.services.frontend.scheduler_client.token_batch import DeliveryOutcome
from quire.shared.columns import u32_bytes
from quire.shared.errors import Internal, QuireError, Unavailable
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.pb.common.v1 import finish_pb2, model_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.process.lifecycle import run_until_first
from quire.shared.rpc.duplex import Duplex

RENEW_AFTER_ID = 2**31  # ids are 32-bit and never reused: the session is closed here, and the next starts at 1

Link = Duplex[pb.SessionResponse, pb.SessionRequest]


class SessionOwner(Protocol):
    """Callbacks that a session makes to its client, from the session's read loop."""

    def on_view(self, session: Session) -> None:
        """Called when the scheduler's cluster has changed."""

    def on_resumed(self, sequence: Sequence, now: float) -> None:
        """Called when a moved sequence gets its first token again."""

    def on_refused(self, sequence: Sequence, error: QuireError) -> None:
        """Called when the scheduler ends a sequence with an error."""

    def on_tokens_delivered(self, seconds: float) -> None:
        """Called after the tokens of a step were delivered. `seconds`: time that took."""


class Session:
    """A session, open from the first ClusterView until run() ends. Sequence ids are never reused within it."""

    def __init__(
        self, link: Link, owner: SessionOwner, welcome: pb.SchedulerWelcome, check: Callable[[pb.ClusterView], None]
    ) -> None:
        """Starts with an empty view. `check` raises if this frontend does not match the view's model."""
        self._link = link
        self._check = check
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._next_id = 1
        self._outbox = Outbox(link, supports_merging=welcome.takes_further_submissions)
        self.scheduler_id = welcome.scheduler_id
        self.epoch = welcome.epoch
        self.closed = asyncio.Event()
        self.live: dict[int, Sequence] = {}
        self.view = pb.ClusterView()
        self.num_tokens_since_view = 0  # submitted after the last view and not known to have started
        self._sent_update = 0  # newest weights update sent to this scheduler
        self._tokens_since_view: dict[int, int] = {}  # sequence id -> its share of num_tokens_since_view
        self.last_tokens_s = self._loop.time()

    async def run(self) -> None:
        await run_until_first(self._read(), self._link.pump())

    async def _read(self) -> None:
        """Handles messages until the session breaks. Raises Unavailable when the scheduler closes it."""
        async for message in self._link.messages():
            match message.WhichOneof("message"):
                case "tokens":
                    has_prompts = message.tokens.HasField("prompt_logprobs")
                    prompts = await self._deliver_prompts(message.tokens.prompt_logprobs) if has_prompts else None
                    self._on_tokens(message.tokens, prompts)
                case "cluster":
                    self._on_view(message.cluster)
        raise Unavailable(f"scheduler {self.scheduler_id} closed the session")

    def _on_view(self, view: pb.ClusterView) -> None:
        """Stores a new cluster view and clears the count of tokens since the last one. Raises if the view's model does
        not match."""
        self._check(view)
        self.view = view
        self._tokens_since_view.clear()
        self.num_tokens_since_view = 0
        self._owner.on_view(self)

    async def _deliver_prompts(self, batch: pb.PromptLogprobBatch) -> DeliveryOutcome:
        """Delivers the log-probabilities of prompts, with turns of the event loop for others between portions."""
        delivery = DeliveryOutcome()
        for _ in token_batch.prompt_portions(batch, self.live, delivery):
            await leave_turns()
        return delivery

    def _on_tokens(self, batch: pb.TokenBatch, prompts: DeliveryOutcome | None = None) -> None:
        """Delivers a step's output; then cancels sequences that need no more or whose sink failed, and reports refused
        and resumed ones to the owner. `prompts`: outcome of _deliver_prompts()."""
        self.last_tokens_s = self._loop.time()
        if self._tokens_since_view:
            for sequence_id in (*(s.sequence_id for s in batch.started), *(f.sequence_id for f in batch.finished)):
                self._forget_backlog(sequence_id)
        began_s = perf_counter()
        delivery = token_batch.deliver(batch, self.live, self.last_tokens_s, prompts)
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
        """Submits consecutive samples of one prompt without tokens, or a single sequence. `num_cached`: prompt tokens
        cached there. If it raises, cancel() undoes its effects. A session whose sequence ids are nearly used up is
        closed afterwards."""
        message = submission.build(sequences, self._next_id, self.view.layout, self._loop.time())
        num_tokens = len(message.token_ids) // TOKEN_BYTES - num_cached
        for sequence in sequences:
            sequence.session, sequence.id = self, self._next_id
            self.live[self._next_id] = sequence
            self._tokens_since_view[self._next_id] = num_tokens
            self.num_tokens_since_view += num_tokens
            self._next_id += 1
        self._outbox.submit(message)
        if self._next_id > RENEW_AFTER_ID:
            self._link.close()

    def send_weights(self, newest: model_pb2.WeightsIdentity) -> None:
        """Sends the weights identity of another scheduler if this one has an older update; once per update."""
        if max(self.view.weights.update, self._sent_update) < newest.update:
            self._sent_update = newest.update
            self._link.send(pb.SessionRequest(weights=newest))

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Ends sequences and notifies the scheduler; nothing more is delivered for them."""
        live = [sequence for sequence in sequences if self.live.pop(sequence.id, None) is not None]
        for sequence in sequences:
            sequence.session = None
            self._forget_backlog(sequence.id)
        self._send_cancellation(live, reason)

    def _forget_backlog(self, sequence_id: int) -> None:
        self.num_tokens_since_view -= self._tokens_since_view.pop(sequence_id, 0)

    def _send_cancellation(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Sends a cancellation of these sequences; nothing for an empty list."""
        if sequences:
            ids = u32_bytes([sequence.id for sequence in sequences])
            self._link.send(pb.SessionRequest(cancellation=pb.Cancellation(sequence_ids=ids, reason=reason)))

    def abandon(self) -> list[Sequence]:
        """Marks the session closed and returns its sequences, in order of submission."""
        self.closed.set()
        sequences = list(self.live.values())
        self.live.clear()
        for sequence in sequences:
            sequence.session = None
        return sequences
