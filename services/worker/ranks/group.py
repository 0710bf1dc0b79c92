"""What rank 0 asks of the group of ranks that it belongs to.

Every rank derives the same step from the same plan. Rank 0 broadcasts a plan before it launches its own part, goes on,
and collects once its own part has finished: a rank that died, failed or derived another step is found there, before a
result leaves the replica.
"""

from __future__ import annotations

from typing import Protocol

from services.worker.step.step_inputs import StepInputs
from shared.errors import QuireError
from shared.pb.common.v1 import finish_pb2
from shared.pb.worker.v1 import worker_pb2 as pb


class RankFailure(QuireError):
    """A rank is gone, failed, or is not at the same step: the replica's epoch cannot go on."""

    code = finish_pb2.ERROR_CODE_INTERNAL


class RankGroup(Protocol):
    """The other ranks. broadcast(), rest() and forget_cache() are called on the thread that computes, collect() on the
    one that waits for results, and rest() when no step is left to collect."""

    @property
    def size(self) -> int:
        """Ranks, rank 0 included."""

    def start(self) -> None:
        """Waits until every rank is ready for plans. Raises RankFailure."""

    def broadcast(self, plan: pb.StepPlan) -> int:
        """Sends the plan to every rank, behind all before it; returns a ticket for collect(). Raises RankFailure."""

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """Waits until every rank has computed its part of the plan; `inputs` are what rank 0 made of it. Tickets in
        their order; those of plans that rank 0 could not launch are left out. Raises RankFailure."""

    def rest(self) -> None:
        """Every rank forgets all slots: an epoch has ended."""

    def forget_cache(self) -> None:
        """Every rank forgets what its blocks hold."""

    def check(self) -> None:
        """Raises RankFailure if a rank is gone. Waits for nothing; any thread may ask."""

    def stop(self, timeout_s: float) -> None:
        """Ends all ranks, those that do not end within `timeout_s` by force. Any thread may ask, more than once."""


class OneRank:
    """A group of rank 0 alone, which costs nothing."""

    size = 1

    def start(self) -> None:
        """There is no other rank."""

    def broadcast(self, plan: pb.StepPlan) -> int:
        return 0

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """There is no other rank."""

    def rest(self) -> None:
        """There is no other rank."""

    def forget_cache(self) -> None:
        """There is no other rank."""

    def check(self) -> None:
        """There is no other rank."""

    def stop(self, timeout_s: float) -> None:
        """There is no other rank."""
