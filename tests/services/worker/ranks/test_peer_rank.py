"""What rank 0 makes of answers and signs of life, whatever another rank is reached by."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts.nodes import RemoteRank
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.processes import RankProcess
from quire.services.worker.ranks.wire import RankReply


class ScriptedRank(PeerRank):
    """Gives the replies and heartbeats that it was made with."""

    max_silent_checks = 2

    def __init__(self, replies: Sequence[RankReply] = (), heartbeats: Sequence[int] = ()) -> None:
        super().__init__(3)
        self._replies, self._heartbeats, self.gone = [*replies], [*heartbeats], False

    def terminate(self, deadline: float) -> None: ...

    def failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")

    def _receive(self, timeout_s: float) -> RankReply | None:
        return self._replies.pop(0) if self._replies else None

    def _check_link(self) -> None:
        if self.gone:
            raise self.failure("is gone")

    def _heartbeat(self) -> int:
        return self._heartbeats.pop(0)


def reply(number: int, text: bytes = b"", *, done: bool = True) -> RankReply:
    return RankReply(number, done, text)


def test_answers_to_commands_that_were_given_up_are_passed_over() -> None:
    rank = ScriptedRank([reply(4), reply(5), reply(6, b"mine")])
    assert rank.await_reply(6, 1.0).text == b"mine"


def test_a_rank_that_failed_or_does_not_answer_is_named_with_the_reason() -> None:
    with pytest.raises(RankFailure, match="rank 3 failed: out of memory"):
        ScriptedRank([reply(5, b"out of memory", done=False)]).await_reply(6, 1.0)
    with pytest.raises(RankFailure, match="rank 3 has not replied within 20 s"):
        ScriptedRank([reply(5)]).await_reply(6, 20.0)


def test_a_rank_may_be_silent_for_some_checks_once_it_is_ready() -> None:
    rank = ScriptedRank(heartbeats=[7] * 9 + [8] + [8] * 3)
    for _ in range(5):
        rank.check()  # it still loads
    rank.ready = True
    rank.check()
    rank.check()
    with pytest.raises(RankFailure, match="rank 3 has sent no heartbeat"):
        rank.check()
    rank = ScriptedRank(heartbeats=[7, 7, 8, 8, 8, 8])
    rank.ready = True
    for _ in range(5):
        rank.check()
    with pytest.raises(RankFailure, match="has sent no heartbeat"):
        rank.check()


def test_a_rank_that_is_told_to_stop_may_be_gone() -> None:
    rank = ScriptedRank()
    rank.gone = True
    with pytest.raises(RankFailure, match="rank 3 is gone"):
        rank.check()
    rank.stopping = True
    rank.check()


def test_other_hosts_ranks_may_be_silent_for_longer() -> None:
    assert RemoteRank.max_silent_checks > RankProcess.max_silent_checks
