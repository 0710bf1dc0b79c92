"""What rank 0 asks of the group of ranks that it belongs to.

Every rank derives the same step from the same plan. Rank 0 broadcasts a plan before it launches its own part, goes on,
and collects once its own part has finished: a rank that died, failed or derived another step is found there, before a
result leaves the replica.
"""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import Internal
from quire.shared.pb.worker.v1 import worker_pb2 as pb


class RankFailure(Internal):
    """A rank is gone, failed, or is not at the same step: the replica's epoch cannot go on."""


class RankGroup(Protocol):
    """The other ranks. collect() is called on the thread that waits for results, rest() when no step is left to
    collect; where nothing else is said, methods are called on the thread that computes."""

    @property
    def size(self) -> int:
        """Ranks, rank 0 included."""

    def start(self) -> None:
        """Waits until every rank is ready for plans. Raises RankFailure."""

    def broadcast(self, plan: StepPlan) -> int:
        """Sends the plan to every rank, behind all before it; returns a ticket for collect(). Raises RankFailure."""

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """Waits until every rank has computed its part of the plan; `inputs` are what rank 0 made of it. Tickets in
        their order; those of plans that rank 0 could not launch are left out. Raises RankFailure."""

    def settle_step(self) -> None:
        """The ranks of the first stage settle their oldest step, as rank 0 does (Replica.launch_pending_heads)."""

    def end_epoch(self) -> None:
        """Every rank forgets all slots: an epoch has ended."""

    def reset_cache(self) -> None:
        """Every rank forgets what its blocks hold."""

    def move_blocks(self, order: pb.Transfer) -> None:
        """Every rank begins to move its part of the same blocks, behind the plans and the moves before. A rank that
        cannot is found by the next collect() or rest()."""

    def blocks_moved(self, transfer_id: int) -> None:
        """Rank 0 has moved its part: no rank does anything that is ordered from here on before it has moved its own.
        Any thread may say it."""

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        """Every rank prepares it, before the plans that name it."""

    def release_grammar(self, grammar_id: bytes) -> None:
        """No later plan names it."""

    def broadcast_order(self, order: pb.DeviceOrder) -> int:
        """Every rank begins to carry it out; returns a ticket for settle(). No step is left to collect. Raises
        RankFailure."""

    def collect_order(self, ticket: int) -> list[str]:
        """Waits until every other rank has obeyed, or could not: why, of each that could not. Raises RankFailure."""

    def check(self) -> None:
        """Raises RankFailure if a rank is gone, or has given no sign of life for some looks. To be called again and
        again, by one thread; waits for nothing."""

    def stop(self, timeout_s: float) -> None:
        """Ends all ranks, those that do not end within `timeout_s` by force. Any thread may ask, more than once."""


class OneRank:
    """A group of rank 0 alone, which costs nothing."""

    size = 1

    def start(self) -> None:
        """There is no other rank."""

    def broadcast(self, plan: StepPlan) -> int:
        return 0

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """There is no other rank."""

    def settle_step(self) -> None:
        """There is no other rank."""

    def end_epoch(self) -> None:
        """There is no other rank."""

    def reset_cache(self) -> None:
        """There is no other rank."""

    def move_blocks(self, order: pb.Transfer) -> None:
        """There is no other rank."""

    def blocks_moved(self, transfer_id: int) -> None:
        """There is no other rank."""

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        """There is no other rank."""

    def release_grammar(self, grammar_id: bytes) -> None:
        """There is no other rank."""

    def broadcast_order(self, order: pb.DeviceOrder) -> int:
        return 0

    def collect_order(self, ticket: int) -> list[str]:
        return []

    def check(self) -> None:
        """There is no other rank."""

    def stop(self, timeout_s: float) -> None:
        """There is no other rank."""
