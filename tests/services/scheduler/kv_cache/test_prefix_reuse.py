"""Prompt tokens that are computed again because blocks are coarse: repeated prompts, and chats.

`pytest -s tests/services/scheduler/kv_cache/test_prefix_reuse.py` prints the table of the scheduler's README.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from tests.services.scheduler.conftest import make_limits, make_sequence

ANSWER = 100  # tokens
CHATS, TURNS = 64, 6


class Conversation:
    """A core, and a worker that returns random tokens."""

    def __init__(self, block_size: int, prefix_grain: int) -> None:
        limits = make_limits(
            block_size=block_size,
            prefix_grain=prefix_grain,
            num_blocks=400_000 // block_size,
            max_num_seqs=64,
            enable_prefix_caching=True,
            max_steps_in_flight=2,
        )
        self.core = Core(limits)
        self._random = random.Random(1)
        self._keys = iter(range(10_000))

    def text(self, shortest: int, longest: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(self._random.randint(shortest, longest))]

    def say(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the answers to prompts that are sent at once."""
        size = self.core.limits.block_size
        sequences = [make_sequence(next(self._keys), prompt, ANSWER, size) for prompt in prompts]
        answers: dict[int, list[int]] = {sequence.key: [] for sequence in sequences}
        for sequence in sequences:
            self.core.add(sequence)
        while self.core.has_work:
            while self.core.schedule(0) is not None:
                pass
            flight = self.core.steps_in_flight[0]
            tokens = np.array([self._random.randrange(1000) for _ in flight.slots], dtype=np.int32)
            self.core.apply(StepResult(flight.step_id, tokens), 0)
            for columns in self.core.take_events().tokens:
                for stream, token in zip(columns.sequence_ids.tolist(), columns.token_ids.tolist(), strict=True):
                    answers[stream].append(token)
        return list(answers.values())

    def computed_again(self, prompts: list[list[int]], num_new: int) -> tuple[float, list[list[int]]]:
        """Returns, per prompt, the computed tokens besides the `num_new` that cannot have been computed, and the
        answers."""
        counts = self.core.counts
        before = counts.prompt_tokens - counts.cached_tokens
        answers = self.say(prompts)
        computed = counts.prompt_tokens - counts.cached_tokens - before
        return (computed - num_new) / len(prompts), answers


def repeated(block_size: int, prefix_grain: int) -> float:
    talk = Conversation(block_size, prefix_grain)
    prompts = [talk.text(100, 1024) for _ in range(256)]
    talk.say(prompts)
    return talk.computed_again(prompts, 0)[0]


def chats(block_size: int, prefix_grain: int) -> float:
    """Returns the tokens per turn, without the first turn."""
    talk = Conversation(block_size, prefix_grain)
    texts = [talk.text(50, 300) for _ in range(CHATS)]
    answers = talk.say(texts)
    total = 0.0
    for _ in range(TURNS - 1):
        asked = [talk.text(20, 150) for _ in range(CHATS)]
        texts = [[*text, *said, *new] for text, said, new in zip(texts, answers, asked, strict=True)]
        num_new = sum(map(len, asked)) + CHATS  # the last token of an answer is only said
        again, answers = talk.computed_again(texts, num_new)
        total += again
    return total / (TURNS - 1)


@pytest.mark.parametrize("trace", [repeated, chats])
def test_few_tokens_of_a_cached_prefix_are_computed_again(trace: object) -> None:
    assert callable(trace)
    found = {(size, grain): trace(size, grain) for size, grain in [(16, 0), (64, 0), (64, 16), (128, 0), (128, 16)]}
    print(f"{trace.__name__}: " + ", ".join(f"blocks of {s}, grain {g}: {n:.1f}" for (s, g), n in found.items()))
    assert found[64, 0] > 20
    assert found[64, 16] < found[16, 0] < 10
    assert found[128, 16] < found[16, 0]
