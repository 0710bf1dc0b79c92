"""Operations of a core between its steps."""

from __future__ import annotations

from quire.services.scheduler.core.sequences.ending import Reason
from tests.services.scheduler.core.steps import NewCore, add, returned


def test_s24_a_reset_with_running_sequences_needs_their_preemption(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    add(c, 20, 20, 20)
    c.schedule(0)
    returned(c, 5, 5, 5)
    assert c.reset_prefix_cache() is None
    assert c.reset_prefix_cache(preempt_running=True) == 3
    assert [s.key for s in c.waiting] == [0, 1, 2]
    assert c.use.cached == 0


def test_deadlines_end_waiting_and_running_sequences(core: NewCore) -> None:
    c = core(max_num_seqs=1)
    add(c, 10, 10, deadline=5.0)
    c.schedule(1.0)
    c.schedule(6.0)
    assert [f.reason for f in c.take_events().finished] == [Reason.DEADLINE] * 2
    returned(c, 5)
    assert not c.take_events()
    assert c.use.used == 0


def test_sequences_without_a_deadline_never_expire(core: NewCore) -> None:
    c = core(max_num_seqs=1)
    add(c, 10, 10)
    c.schedule(1.0)
    c.schedule(1e12)
    assert not c.take_events().finished


def test_a_cancelled_sequence_frees_its_blocks_when_its_step_returns(core: NewCore) -> None:
    c = core(max_steps_in_flight=2)
    add(c, 10)
    c.schedule(0)
    c.cancel(0)
    c.cancel(0)
    assert [f.reason for f in c.take_events().finished] == [Reason.CANCELLED]
    assert c.use.used == 1
    returned(c, 5)
    assert c.use.used == 0


def test_pending_work_is_counted_in_tokens(core: NewCore) -> None:
    c = core(max_num_batched_tokens=100, max_num_seqs=2)
    add(c, 150, 60, 30)
    assert c.num_pending_tokens == 240
    c.schedule(0)
    assert c.num_pending_tokens == 140
    c.cancel(2)
    assert c.num_pending_tokens == 110
