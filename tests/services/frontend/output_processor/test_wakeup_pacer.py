"""Tests that readers are woken in rounds: output during writes is merged, and no reader waits long for a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.sample import Mailbox
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from tests.waiting import loop_turns

LONG_S = 1000.0


class MergingOutput:
    """Pending output that merges its tokens."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._tokens: list[int] = []

    def add(self, token: int) -> None:
        self._tokens.append(token)
        if len(self._tokens) == 1:
            self._mailbox.put(self)

    def take_delta(self) -> SampleDelta:
        tokens, self._tokens = self._tokens, []
        return SampleDelta(0, tokens, "", [], None)


class Stream:
    """Client that reads when it is allowed to."""

    def __init__(self, rounds: WakeupPacer) -> None:
        self.pacer = rounds
        self.mailbox = Mailbox(rounds)
        self.output = MergingOutput(self.mailbox)
        self.messages: list[list[int]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                for delta in await self.mailbox.next_deltas():
                    await self.reads.wait()
                    self.messages.append(delta.token_ids)
        finally:
            self.mailbox.close()


async def run_pending() -> None:
    """Runs everything that can happen without time passing."""
    await loop_turns(10)


class Clock:
    """Clock that stands still unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def cut_short(rounds: WakeupPacer, begin: Callable[[], None]) -> None:
    """Ends the round that `begin` begins at once, even if readers are still writing."""
    rounds.longest_round_s = 0.0
    begin()
    await run_pending()
    await asyncio.sleep(0.001)  # lets the due timer fire
    rounds.longest_round_s = LONG_S


async def streams(observed: list[float], clock: Clock | None = None) -> tuple[Stream, Stream]:
    clock = clock or Clock()
    rounds = WakeupPacer(observed.append, clock, clock, LONG_S)
    pair = Stream(rounds), Stream(rounds)
    await run_pending()
    return pair


async def test_output_during_writes_is_one_message() -> None:
    observed: list[float] = []
    slow, quick = await streams(observed)
    slow.reads.clear()
    for token in (1, 2, 3):
        slow.output.add(token)
        quick.output.add(token)
        await run_pending()
    assert (quick.messages, slow.messages) == ([[1]], [])
    slow.reads.set()
    await run_pending()
    assert (quick.messages, slow.messages) == ([[1], [2, 3]], [[1], [2, 3]])
    assert len(observed) == 2


async def test_a_single_stream_sends_one_message_per_step() -> None:
    stream, _ = await streams([])
    for token in (1, 2, 3):
        stream.output.add(token)
        await run_pending()
    assert stream.messages == [[1], [2], [3]]


async def test_a_late_reader_does_not_delay_the_others() -> None:
    slow, quick = await streams([])
    slow.reads.clear()
    await cut_short(slow.pacer, lambda: slow.output.add(1))
    for token in (2, 3, 4):
        slow.output.add(token)
        quick.output.add(token)
        await run_pending()
    assert quick.messages == [[2], [3], [4]]


async def test_rounds_do_not_wait_for_late_readers(
    clock: Clock,
) -> None:
    slow, quick = await streams([], clock)
    slow.reads.clear()
    await cut_short(slow.pacer, lambda: slow.output.add(1))
    clock.now = 2 * LONG_S
    slow.reads.set()
    await run_pending()  # it has written, but late
    slow.reads.clear()
    for token in (2, 3):
        slow.output.add(token)
        quick.output.add(token)
        await run_pending()
    assert quick.messages == [[2], [3]]
    slow.reads.set()
    await run_pending()  # it has written in time
    slow.reads.clear()
    for token in (4, 5):
        slow.output.add(token)
        quick.output.add(token)
        await run_pending()
    assert quick.messages == [[2], [3], [4]]
    assert slow.messages == [[1], [2], [3]]


async def test_a_cancelled_stream_ends_its_part_of_the_round() -> None:
    slow, quick = await streams([])
    slow.reads.clear()
    for token in (1, 2):
        slow.output.add(token)
        quick.output.add(token)
        await run_pending()
    assert quick.messages == [[1]]
    slow.task.cancel()
    await run_pending()
    assert quick.messages == [[1], [2]]
    assert slow.task.done()
