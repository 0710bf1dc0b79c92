"""Interface of rank 0 to the other ranks of its replica.

Every rank derives the same step from the same plan. Rank 0 broadcasts a plan, launches its own part without waiting,
and collects the replies when its own part has finished: a rank that died, failed or derived a different step is
detected before a result leaves the replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.services.worker.step.fetched_item import Fetched
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import Internal
from quire.shared.pb.worker.v1 import worker_pb2 as pb


class RankFailure(Internal):
    """A rank has ended, failed, or computed a different step: the epoch cannot continue."""


class RankGroup(Protocol):
    """The other ranks of a replica. collect() is called on the waiting thread, end_epoch() when no step is left to
    collect; all other methods on the computing thread unless stated."""

    @property
    def size(self) -> int:
        """Number of ranks, including rank 0."""

    def wait_ready(self) -> None:
        """Waits until every rank is ready for plans. Raises RankFailure."""

    def broadcast(self, plan: StepPlan) -> int:
        """Sends the plan to every rank and returns a ticket for collect(). Raises RankFailure."""

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """Waits until every rank has launched its part of the plan and derived the same step as `inputs`. Tickets come
        in order; those of plans that rank 0 failed to launch are skipped. Raises RankFailure."""

    def settle_step(self) -> None:
        """Makes the ranks of the first stage launch the heads of their oldest step (Replica.launch_pending_heads), as
        rank 0 does."""

    def end_epoch(self) -> None:
        """Makes every rank release all slots."""

    def reset_cache(self) -> None:
        """Makes every rank discard its record of block contents."""

    def move_blocks(self, order: pb.Transfer) -> None:
        """Makes every rank start its part of a block transfer, after earlier plans and transfers. A failure is reported
        by the next collect() or end_epoch()."""

    def blocks_moved(self, transfer_id: int) -> None:
        """Reports that rank 0's part of a transfer has finished: every rank waits for its part before any later
        command. Callable from any thread."""

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        """Makes every rank compile a grammar, before plans that use it."""

    def release_grammar(self, grammar_id: bytes) -> None:
        """Makes every rank release a grammar that no later plan uses."""

    def encode_media(self, items: Sequence[Fetched]) -> None:
        """Makes every rank encode media items, before plans that use their rows."""

    def release_media(self, identifier: bytes) -> None:
        """Makes every rank release the rows of an item that no later plan uses."""

    def broadcast_order(self, order: pb.DeviceOrder) -> int:
        """Makes every rank execute a device order; returns a ticket for collect_order(). No step may be uncollected.
        Raises RankFailure."""

    def collect_order(self, ticket: int) -> list[str]:
        """Waits for all ranks; returns the reasons of those that refused the order. Raises RankFailure."""

    def check(self) -> None:
        """Raises RankFailure if a rank has ended or sent no heartbeat for several checks. Called periodically by one
        thread; does not block."""

    def stop(self, timeout_s: float) -> None:
        """Ends all ranks, by force after `timeout_s`. Callable from any thread, repeatedly."""


class OneRank:
    """Null group of a replica with a single rank."""

    size = 1

    def wait_ready(self) -> None:
        """No-op: there is no other rank."""

    def broadcast(self, plan: StepPlan) -> int:
        return 0

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """No-op: there is no other rank."""

    def settle_step(self) -> None:
        """No-op: there is no other rank."""

    def end_epoch(self) -> None:
        """No-op: there is no other rank."""

    def reset_cache(self) -> None:
        """No-op: there is no other rank."""

    def move_blocks(self, order: pb.Transfer) -> None:
        """No-op: there is no other rank."""

    def blocks_moved(self, transfer_id: int) -> None:
        """No-op: there is no other rank."""

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        """No-op: there is no other rank."""

    def release_grammar(self, grammar_id: bytes) -> None:
        """No-op: there is no other rank."""

    def encode_media(self, items: Sequence[Fetched]) -> None:
        """No-op: there is no other rank."""

    def release_media(self, identifier: bytes) -> None:
        """No-op: there is no other rank."""

    def broadcast_order(self, order: pb.DeviceOrder) -> int:
        return 0

    def collect_order(self, ticket: int) -> list[str]:
        return []

    def check(self) -> None:
        """No-op: there is no other rank."""

    def stop(self, timeout_s: float) -> None:
        """No-op: there is no other rank."""
