"""Prefill/decode disaggregation: one worker computes a sequence's prompt, another one continues with decoding.

As chunks of the prompt are computed, their full blocks are sent to the decode worker, which reserves them. Meanwhile
the prefill worker continues the sequence after its first token. Once the blocks have arrived and the decode worker has
room, the sequence migrates; only the tokens after its last full block are computed again. A failure on the way costs at
most a recomputation, because the sequence runs where it is until it migrates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.placement.peer_topology import PeerTopology, borrow_from
from quire.services.scheduler.placement.placement import Placement, cost
from quire.services.scheduler.placement.roles import DECODE, PREFILL, can_be_handed_over, should_use_prefill_worker
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics

log = logger("handover")

MAX_FAILURES = 2  # failed fetches of a handover before the decode worker computes what is missing

Move = Callable[[Sequence, Replica], None]


@dataclass(slots=True, eq=False)
class Handover:
    """Handover of one sequence. Compared by identity."""

    sequence: Sequence
    source: Replica
    target: Replica
    reservation_id: int  # reservation of blocks on the target
    num_sent: int  # leading blocks that the target has, or that are on their way
    num_failed: int = 0
    moved: bool = False  # the sequence is queued or runs on the target


class Handovers:
    """Handovers between all workers of a scheduler: starts them for sequences placed on prefill workers, and
    advances them after each pump."""

    def __init__(
        self, peer_topology: PeerTopology, placement: Placement, threshold: int, metrics: SchedulerMetrics, move: Move
    ) -> None:
        """`move`: moves a sequence from its worker to another one."""
        self._peer_topology, self._placement, self._threshold = peer_topology, placement, threshold
        self._metrics, self._move = metrics, move
        self._of: dict[Replica, dict[int, Handover]] = {}  # handovers by worker (source or target) and sequence key
        self._awaiting_start: dict[
            Replica, list[Sequence]
        ] = {}  # sequences placed on prefill workers since their last pump
        self._missing: str | None = None  # the missing role at the last check

    def __len__(self) -> int:
        return len({id(handover) for of in self._of.values() for handover in of.values()})

    # Placement.

    def place(self, sequence: Sequence, replicas: Seq[Replica]) -> Replica | None:
        """Returns the worker for a sequence: a prefill worker if there are any, the sequence can be handed over, and
        that is worth it, else the best of the others; None if no worker can take it."""
        prefills = [replica for replica in replicas if replica.hello.role == PREFILL]
        if not prefills:
            return self._placement.place(sequence, replicas)
        non_prefills = [replica for replica in replicas if replica.hello.role != PREFILL]
        decoder = self._placement.place(sequence, non_prefills)
        if sequence.samples_nothing or decoder is None:
            return self._placement.place(sequence, replicas)
        prefill = self._placement.place(sequence, prefills) if can_be_handed_over(sequence) else None
        if prefill is None or not self._goes_to(prefill, decoder, sequence):
            return decoder
        return (
            prefill if decoder.links[prefill.id].allow_attempt() else decoder
        )  # no fetch would succeed: the prompt would be computed twice

    def _goes_to(self, prefill: Replica, decoder: Replica, sequence: Sequence) -> bool:
        """Returns whether the sequence's prompt is better computed on `prefill` than on `decoder`, by their work and
        the uncached tokens."""
        cached = decoder.core.num_cached(sequence)
        return should_use_prefill_worker(
            uncached=sequence.num_tokens - cached,
            decoder_work=cost(sequence, decoder, cached)[0],
            prefill_work=cost(sequence, prefill, prefill.core.num_cached(sequence))[0],
            threshold=self._threshold,
        )

    def on_placed(self, sequence: Sequence, replica: Replica) -> None:
        """Notes that `sequence` is placed on `replica`."""
        if replica.hello.role == PREFILL and can_be_handed_over(sequence):
            self._awaiting_start.setdefault(replica, []).append(sequence)

    # Workers.

    def on_workers_changed(self, replicas: Iterable[Replica]) -> None:
        """Checks the roles after workers attached or detached; warns when one of the two roles is missing."""
        roles = {replica.hello.role for replica in replicas}
        separate_roles = roles & {PREFILL, DECODE}
        missing = PREFILL if separate_roles == {DECODE} else DECODE if roles == {PREFILL} else None
        self._metrics.roles_missing.labels(PREFILL).set(missing == PREFILL)
        self._metrics.roles_missing.labels(DECODE).set(missing == DECODE)
        if missing != self._missing and missing is not None:
            log.warning("no worker has the role; workers of the other role do its work", role=missing)
        self._missing = missing

    def on_worker_detached(self, replica: Replica) -> None:
        """Ends the handovers of a worker that is gone; those to it start again with another target."""
        for handover in list(self._of.get(replica, {}).values()):
            self._end(handover)
            if handover.target is replica and not handover.moved:
                self._begin(handover.sequence, handover.source)
        self._of.pop(replica, None)
        self._awaiting_start.pop(replica, None)

    def on_pump(self, replica: Replica) -> None:
        """Starts and advances the handovers of a worker after its pump."""
        for sequence in self._awaiting_start.pop(replica, ()):
            if replica.core.find(sequence.key) is sequence:
                self._begin(sequence, replica)
        handovers = self._of.get(replica)
        if handovers:
            for handover in list(handovers.values()):
                self._advance(handover)

    # One handover.

    def _begin(self, sequence: Sequence, source: Replica) -> None:
        """Starts a handover of `sequence` to a decode worker, which reserves the leading blocks that it has already;
        without a suitable worker, the sequence stays where it is."""
        target = self._target(sequence, source)
        if target is None or target.core.peer_blocks is None:
            return  # the sequence stays where it is
        found = list(target.core.kv.match(sequence.block_hashes).blocks)
        handover = Handover(sequence, source, target, target.core.peer_blocks.open_reservation(found), len(found))
        for replica in (source, target):
            self._of.setdefault(replica, {})[sequence.key] = handover

    def _target(self, sequence: Sequence, source: Replica) -> Replica | None:
        """Returns the decode worker with the fewest sequences, those on their way included."""
        candidates = [
            replica
            for replica in self._peer_topology.readable_peers(source)
            if replica.hello.role != PREFILL
            and replica.takes_sequences
            and replica.adapters.accepts(sequence.adapter)
            and replica.core.limits.refusal(sequence.num_tokens) is None
        ]
        return min(candidates, key=self._load, default=None)

    def _load(self, replica: Replica) -> tuple[int, int]:
        handovers = self._of.get(replica, {}).values()
        num_expected = sum(handover.target is replica and not handover.moved for handover in handovers)
        return replica.core.num_sequences + num_expected, replica.core.num_pending_tokens

    def _end(self, handover: Handover) -> None:
        """Forgets a handover and closes its reservation on the target, whose blocks become free cached blocks."""
        for replica in (handover.source, handover.target):
            self._of.get(replica, {}).pop(handover.sequence.key, None)
        if handover.target.core.peer_blocks is not None:
            handover.target.core.peer_blocks.close_reservation(handover.reservation_id)

    def _advance(self, handover: Handover) -> None:
        """Sends the handover's new blocks and moves the sequence when it is ready; ends a handover that is complete
        or whose sequence has finished, and starts again with another target if this one no longer accepts sequences."""
        sequence, status = handover.sequence, handover.sequence.status
        if status is SequenceStatus.FINISHED or (handover.moved and status is SequenceStatus.RUNNING):
            self._end(handover)
        elif not handover.moved and status is SequenceStatus.RUNNING:
            if not handover.target.takes_sequences:
                self._end(handover)
                self._begin(sequence, handover.source)
            elif not (handover.source.generation_paused or handover.target.generation_paused or handover.target.paused):
                self._send(handover)
                self._move_if_ready(handover)

    def _send(self, handover: Handover) -> None:
        """Sends the blocks filled since the last call, if the target has room for them."""
        source, target, hashes = handover.source.core, handover.target.core, handover.sequence.block_hashes
        assert target.peer_blocks is not None, "targets can fetch blocks"
        if not target.peer_blocks.num_incoming(handover.reservation_id):
            self._check(handover)
        count = min(int(source.kv.num_hashed[handover.sequence.slot]), len(hashes)) - handover.num_sent
        if count <= 0 or handover.num_failed >= MAX_FAILURES:
            return
        if target.kv.pool.num_free < count + target.limits.watermark_blocks:
            return
        assert source.peer_blocks is not None, "it shares its blocks"
        count = source.peer_blocks.num_found(hashes, handover.num_sent, count)
        if count:
            borrowed = borrow_from(handover.source, hashes, handover.num_sent, count)
            sent_hashes = hashes[handover.num_sent : handover.num_sent + count]
            target.peer_blocks.order_fetch(borrowed, [], sent_hashes, holder=handover.reservation_id)
            handover.num_sent += count
            handover.target.wake()

    def _check(self, handover: Handover) -> None:
        """Checks that all sent blocks have arrived, when no fetch is in flight; counts a failure otherwise."""
        fetches = handover.target.core.peer_blocks
        assert fetches is not None, "targets can fetch blocks"
        found = fetches.num_found(handover.sequence.block_hashes, 0, handover.num_sent)
        if found < handover.num_sent:
            handover.num_failed += 1
            handover.num_sent = found

    def _move_if_ready(self, handover: Handover) -> None:
        """Moves the sequence to the target if it has its first token, all prompt blocks have arrived (or sending
        them has failed too often), and the target would admit it now."""
        sequence, source, target = handover.sequence, handover.source, handover.target
        fetches = target.core.peer_blocks
        assert fetches is not None, "targets can fetch blocks"
        if not source.core.running.has_progressed(sequence) or fetches.num_incoming(handover.reservation_id):
            return
        prompt_blocks = sequence.num_prompt_tokens // source.core.limits.block_size
        complete = handover.num_sent >= prompt_blocks
        if not (complete or handover.num_failed >= MAX_FAILURES):
            return  # the target had no room for the rest: wait until it has
        if not target.core.has_room_for_migrated(sequence.num_tokens, handover.num_sent):
            return
        handover.moved = True
        self._metrics.handovers.labels("done" if complete else "computed").inc()
        self._of[source].pop(sequence.key, None)
        self._move(sequence, target)
