"""Readers are woken in rounds: what comes while others write is merged, and nobody waits for a slow one for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.mailbox import Mailbox
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from tests.waiting import loop_turns

LONG_S = 1000.0


class MergingOutput:
    """News that merge."""

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
    """A client that reads when it is allowed to."""

    def __init__(self, rounds: WakeupPacer) -> None:
        self.pace = rounds
        self.mailbox = Mailbox(rounds)
        self.letter = MergingOutput(self.mailbox)
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


async def settle() -> None:
    """Everything that can happen without time passing."""
    await loop_turns(10)


class Clock:
    """Stands still unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def cut_short(rounds: WakeupPacer, begin: Callable[[], None]) -> None:
    """The round that `begin` begins ends at once, whoever is still writing."""
    rounds.longest_round_s = 0.0
    begin()
    await settle()
    await asyncio.sleep(0.001)  # a timer that is due
    rounds.longest_round_s = LONG_S


async def streams(observed: list[float], clock: Clock | None = None) -> tuple[Stream, Stream]:
    clock = clock or Clock()
    rounds = WakeupPacer(observed.append, clock, clock, LONG_S)
    pair = Stream(rounds), Stream(rounds)
    await settle()
    return pair


async def test_what_comes_while_others_write_is_one_message() -> None:
    observed: list[float] = []
    slow, quick = await streams(observed)
    slow.reads.clear()
    for token in (1, 2, 3):
        slow.letter.add(token)
        quick.letter.add(token)
        await settle()
    assert (quick.messages, slow.messages) == ([[1]], [])
    slow.reads.set()
    await settle()
    assert (quick.messages, slow.messages) == ([[1], [2, 3]], [[1], [2, 3]])
    assert len(observed) == 2


async def test_alone_every_step_is_a_message() -> None:
    stream, _ = await streams([])
    for token in (1, 2, 3):
        stream.letter.add(token)
        await settle()
    assert stream.messages == [[1], [2], [3]]


async def test_a_reader_that_is_late_holds_up_nobody() -> None:
    slow, quick = await streams([])
    slow.reads.clear()
    await cut_short(slow.pace, lambda: slow.letter.add(1))
    for token in (2, 3, 4):
        slow.letter.add(token)
        quick.letter.add(token)
        await settle()
    assert quick.messages == [[2], [3], [4]]


async def test_a_reader_that_was_late_is_not_waited_for_until_it_was_in_time(
    clock: Clock,
) -> None:
    slow, quick = await streams([], clock)
    slow.reads.clear()
    await cut_short(slow.pace, lambda: slow.letter.add(1))
    clock.now = 2 * LONG_S
    slow.reads.set()
    await settle()  # back, and late
    slow.reads.clear()
    for token in (2, 3):
        slow.letter.add(token)
        quick.letter.add(token)
        await settle()
    assert quick.messages == [[2], [3]]
    slow.reads.set()
    await settle()  # back in time
    slow.reads.clear()
    for token in (4, 5):
        slow.letter.add(token)
        quick.letter.add(token)
        await settle()
    assert quick.messages == [[2], [3], [4]]
    assert slow.messages == [[1], [2], [3]]


async def test_a_stream_that_is_given_up_ends_its_part_of_the_round() -> None:
    slow, quick = await streams([])
    slow.reads.clear()
    for token in (1, 2):
        slow.letter.add(token)
        quick.letter.add(token)
        await settle()
    assert quick.messages == [[1]]
    slow.task.cancel()
    await settle()
    assert quick.messages == [[1], [2]]
    assert slow.task.done()
